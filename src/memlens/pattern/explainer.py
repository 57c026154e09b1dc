"""Descriptions of memories that a language model behind an OpenAI-compatible endpoint proposes, each with a test.

 1. The model reads half of a memory's triggers and proposes a description of one line.
 2. In a new conversation, the model reads this description and the other half of the triggers, mixed with random
    prefixes of the corpus. It names the prefixes that fit the description.
 3. The score is the balanced accuracy of this detection. Chance is 0.5.

The user chooses the endpoint. The endpoint receives triggers of the described memories and, if the environment variable
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
TOP = 24  # number of triggers: one half is described, the other half tests the description
_CHARACTERS = 300  # number of characters to send from the end of a prefix
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
    """The address of an OpenAI-compatible endpoint and the name of the model to ask."""

    url: str  # base address, such as http://localhost:8080/v1
    model: str = "default"

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # invalid port or unbalanced bracket
            is_usable = False
        if not is_usable:
            raise SettingError(f"--explainer is '{self.url}'; give an address like http://localhost:8080/v1")

    def ask(self, prompt: str) -> str:
        """Send a prompt in a new conversation and return the answer."""
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
                f"{address} answered {error.code} {error.reason}; check the address, the key and the model"
            ) from error
        except (OSError, ValueError, RecursionError, HTTPException) as error:
            reason = str(getattr(error, "reason", error)).splitlines()[:1]
            raise SettingError(
                f"{address} gave no usable answer ({''.join(reason)}); check that it is running"
            ) from error
        return _message(content, address)


def _message(content: Any, address: str) -> str:
    try:
        text = content["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        text = None
    if not isinstance(text, str) or not text.strip():
        raise SettingError(f"the answer of {address} has no message; check that the endpoint is OpenAI-compatible")
    return text


@dataclass(frozen=True)
class Proposal:
    """A language model's description of a memory's triggers, and how well the description detects other triggers."""

    memory: MemoryId
    description: str
    by: str
    detection: float | None  # balanced accuracy on held-out triggers and random prefixes; None if not tested
    held_out: int
    proposal: bool = True  # always True; marks the record as a proposal in JSON

    @property
    def detection_text(self) -> str:
        return "not tested" if self.detection is None else f"{self.detection:.2f} on {self.held_out} held-out triggers"


def propose(index: Index, memory: str | MemoryId, explainer: Explainer, seed: int = 0) -> Proposal:
    """Ask the endpoint to describe half of a memory's triggers, and test the description on the other half."""
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
    detected = _numbers(explainer.ask(_DETECT.format(description=description) + lines))
    pairs = [(number in detected, mixed[place][1]) for number, place in enumerate(order, 1)]
    return (pairs.count((True, True)) / len(triggers) + pairs.count((False, False)) / len(others)) / 2


def _numbers(answer: str) -> set[int]:
    """Return the numbers in the last list of the answer, or an empty set."""
    lists: list[str] = re.findall(r"\[([\d,\s]*)\]", answer)
    return {int(number) for number in re.findall(r"\d+", lists[-1])} if lists else set()


def _random_texts(index: Index, count: int, random: np.random.Generator, without: set[str]) -> list[str]:
    sentences, positions = sample_prefixes(index, 4 * count + 16, int(random.integers(1 << 31)))
    order = random.permutation(len(sentences)).tolist()
    rows = index.sentences(sorted(set(sentences.tolist())))
    texts: list[str] = []
    for place in order:
        row = rows[int(sentences[place])]
        text = _end(row["text"][: row["ends"][positions[place]]])
        if text not in without and text not in texts:
            texts.append(text)
    return texts[:count]


def _end(text: str) -> str:
    """Return the last _CHARACTERS characters of the text on one line."""
    return " ".join(text.split())[-_CHARACTERS:]
