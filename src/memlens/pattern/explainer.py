"""Optional descriptions from a language model behind an OpenAI-compatible endpoint, and a test of each.

 1. The model sees half of a memory's triggers and proposes one line.
 2. In a new conversation, the model sees the line and the other half mixed with random prefixes of the corpus, and
    names those that the line fits.
 3. The score is the balanced accuracy of this detection. Chance is 0.5.

The user chooses the endpoint. It receives prefixes of the memories in question and, if the environment variable
MEMLENS_EXPLAINER_KEY is set, this key. A proposal names its author and is never added to the patterns.
"""

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from memlens.errors import SettingError
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.pattern.words import sample_prefixes

KEY_VARIABLE = "MEMLENS_EXPLAINER_KEY"
TOP = 24  # triggers: half to describe, half to detect
_CHARACTERS = 300  # number of last characters of a prefix to send
_SECONDS = 120.0

_DESCRIBE = (
    "Each line below is the beginning of a sentence, up to one point. One unit of a language model reacts strongly "
    "at the end of every line. In at most fifteen words, say what these lines have in common: how they end, or what "
    "they are about. Answer with that description only.\n\n"
)
_DETECT = (
    "Below are numbered beginnings of sentences. Which of them fit this description: {description}\n"
    "Answer with a JSON list of their numbers only, like [1, 4]; [] if none fits.\n\n"
)


@dataclass(frozen=True)
class Explainer:
    """The endpoint and model to ask."""

    url: str  # base address, such as http://localhost:8080/v1
    model: str = "default"

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # invalid port or unbalanced bracket
            usable = False
        if not usable:
            raise SettingError(f"--explainer is '{self.url}'; give an address like http://localhost:8080/v1")

    def ask(self, prompt: str) -> str:
        """Return the answer to one question in a new conversation."""
        body = {"model": self.model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
        headers = {"Content-Type": "application/json"}
        key = os.environ.get(KEY_VARIABLE)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        address = self.url.rstrip("/") + "/chat/completions"
        try:
            request = urllib.request.Request(address, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                content = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise SettingError(
                f"{address} answers {error.code} {error.reason}; check the address, key and model"
            ) from error
        except (OSError, ValueError, RecursionError, HTTPException) as error:
            reason = str(getattr(error, "reason", error)).splitlines()[:1]
            raise SettingError(f"{address} gives no usable answer ({''.join(reason)}); is it running?") from error
        return _message(content, address)


def _message(content: Any, address: str) -> str:
    try:
        text = content["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        text = None
    if not isinstance(text, str) or not text.strip():
        raise SettingError(f"{address} answers without a message; is it an OpenAI-compatible endpoint?")
    return text


@dataclass(frozen=True)
class Proposal:
    """A language model's description of a memory's triggers, and how well it separates them from other prefixes."""

    memory: MemoryId
    description: str
    by: str
    detection: float | None  # balanced accuracy on held-out triggers and random prefixes; None if it was not tested
    held_out: int
    proposal: bool = True  # marks the record as a proposal in JSON

    @property
    def detection_text(self) -> str:
        return "not tested" if self.detection is None else f"{self.detection:.2f} on {self.held_out} held-out triggers"


def propose(index: Index, memory: str | MemoryId, explainer: Explainer, seed: int = 0) -> Proposal:
    """Ask for a description from half of the triggers and test it on the other half."""
    name = index.check(memory)
    texts = [_end(trigger.text) for trigger in index.triggers(name, limit=TOP)]
    if len(texts) < 3:
        raise SettingError(f"{name} has {len(texts)} triggers; a description needs at least 3")
    shown, held_out = texts[::2], texts[1::2]
    answer = explainer.ask(_DESCRIBE + "\n".join(shown))
    description = " ".join(answer.split())[:200]
    random = np.random.default_rng([seed, 11, name.layer, name.memory])
    others = _random_texts(index, len(held_out), random, set(texts))
    score = _detection(explainer, description, held_out, others, random) if others else None
    return Proposal(name, description, f"{explainer.model} at {urlsplit(explainer.url).netloc}", score, len(held_out))


def _detection(
    explainer: Explainer, description: str, triggers: Sequence[str], others: Sequence[str], random: np.random.Generator
) -> float:
    mixed = [(text, True) for text in triggers] + [(text, False) for text in others]
    order = random.permutation(len(mixed)).tolist()
    lines = "\n".join(f"{number}. {mixed[place][0]}" for number, place in enumerate(order, 1))
    chosen = _numbers(explainer.ask(_DETECT.format(description=description) + lines))
    picks = [(number in chosen, mixed[place][1]) for number, place in enumerate(order, 1)]
    return (picks.count((True, True)) / len(triggers) + picks.count((False, False)) / len(others)) / 2


def _numbers(answer: str) -> set[int]:
    """Return the numbers in the last list of the answer, or an empty set."""
    lists: list[str] = re.findall(r"\[([\d,\s]*)\]", answer)
    return {int(number) for number in re.findall(r"\d+", lists[-1])} if lists else set()


def _random_texts(index: Index, count: int, random: np.random.Generator, without: set[str]) -> list[str]:
    sentences, positions = sample_prefixes(index, 4 * count + 16, int(random.integers(1 << 31)))
    order = random.permutation(len(sentences)).tolist()
    rows = index.sentences(sorted(set(sentences.tolist())))
    found: list[str] = []
    for place in order:
        row = rows[int(sentences[place])]
        text = _end(row["text"][: row["ends"][positions[place]]])
        if text not in without and text not in found:
            found.append(text)
    return found[:count]


def _end(text: str) -> str:
    """Return the end of the text as one line."""
    return " ".join(text.split())[-_CHARACTERS:]
