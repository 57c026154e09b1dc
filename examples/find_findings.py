"""Find memories with a clear pattern, a value that promotes the next token, and an effect on held-out text.

    python examples/find_findings.py INDEX --held-out TEXT [TEXT ...] [--count 10] [--prompts 12] [--json]

The index must have values and patterns.

1. Candidates are memories whose triggers have patterns and are followed by a token that the value promotes. They are
   ranked by the share of triggers with a pattern, the share of triggers that the token follows, and the effect of the
   strongest trigger on the logit of the token.
2. For each candidate, the held-out prefixes with the highest coefficients are selected: one per sentence, each once,
   and none from a scanned sentence.
3. On each of these prefixes, the candidate is silenced. The probability of the token is measured with and without it.
   As a control, the ten largest other memories of the layer at the same position are silenced one at a time.

Memories with the largest effect are printed first, with commands that repeat the measurements. Memories whose effect
has the wrong sign are also printed.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

import memlens
from memlens.corpus.sentences import read_units
from memlens.memory import MemoryId
from memlens.models.groups import CoefficientBlock
from memlens.models.memory_model import MemoryModel
from memlens.settings import CorpusSettings

LOOKED_AT = 10  # number of top tokens of a value among which the next token must be
CONTROLS = 10  # other memories that are silenced for comparison
COVERED = 0.5  # least share of triggers with a pattern
BATCH_TOKENS = 2048


@dataclass(frozen=True)
class Candidate:
    """A memory with its data from the index."""

    memory: MemoryId
    name: str
    patterns: list[str]
    token: int  # the promoted token that follows most triggers
    text: str
    follows: int  # number of triggers that the token follows
    covered: int  # number of triggers with a pattern
    triggers: int
    examples: list[str]
    push: float  # approximate effect of the strongest trigger on the logit, relative to the mean

    @property
    def clarity(self) -> float:
        """Share of triggers with a pattern, times the share that the token follows, times the effect on the logit."""
        return self.covered / self.triggers * self.follows / self.triggers * self.push


@dataclass(frozen=True)
class Measured:
    """The effect of silencing the memory on its token after one held-out prompt."""

    prompt: str
    coefficient: float
    p: float
    p_without: float
    control: float  # median of log(p / p without) over the largest other memories of the layer
    is_next: bool  # True if the token follows in the text

    @property
    def effect(self) -> float:
        """log(p / p without the memory). Above 0, the memory supports its token."""
        return log_ratio(self.p, self.p_without)


@dataclass(frozen=True)
class Finding:
    """A candidate with its measurements."""

    candidate: Candidate
    measured: list[Measured] = field(default_factory=list)

    @property
    def fell(self) -> int:
        """Number of prompts after which the token is less likely without the memory."""
        return sum(one.effect > 0 for one in self.measured)

    @property
    def effect(self) -> float:
        return statistics.median(one.effect for one in self.measured) if self.measured else 0.0


def log_ratio(p: float, without: float) -> float:
    least = sys.float_info.min
    return math.log(max(p, least) / max(without, least))


def find_candidates(index: memlens.Index, count: int) -> list[Candidate]:
    """Return the clearest candidates of the index. Each pair of pattern and token occurs once."""
    rows = index.sql(
        """
        SELECT n.layer, n.memory, n.name, n.triggers, n.covered, n.follows, n.follows_times, v.tokens, v.p, m.max
        FROM {names} n JOIN {values} v USING (layer, memory) JOIN {memories} m USING (layer, memory)
        WHERE n.agrees AND n.patterns > 0 AND n.covered >= $1 * n.triggers ORDER BY n.layer, n.memory
        """,
        [COVERED],
    )
    descriptions: dict[tuple[int, int], list[str]] = {}
    for row in index.sql("SELECT layer, memory, description FROM {patterns} ORDER BY confidence DESC, pattern"):
        descriptions.setdefault((row["layer"], row["memory"]), []).append(row["description"])
    found = [_candidate(index, row, descriptions[row["layer"], row["memory"]]) for row in rows]
    found.sort(key=lambda one: (-one.clarity, one.memory))
    seen: set[tuple[str, int]] = set()
    kept = []
    for one in found:
        if (one.patterns[0], one.token) not in seen:
            seen.add((one.patterns[0], one.token))
            kept.append(one)
    return [_with_examples(index, one) for one in kept[:count]]


def _candidate(index: memlens.Index, row: dict[str, Any], patterns: list[str]) -> Candidate:
    promoted = set(row["tokens"][:LOOKED_AT])
    token, times = next(pair for pair in zip(row["follows"], row["follows_times"], strict=True) if pair[0] in promoted)
    return Candidate(
        memory=MemoryId(row["layer"], row["memory"]),
        name=row["name"],
        patterns=patterns,
        token=token,
        text=index.vocabulary[token],
        follows=times,
        covered=row["covered"],
        triggers=row["triggers"],
        examples=[],
        push=row["max"] * math.log(row["p"][row["tokens"].index(token)] * len(index.vocabulary)),
    )


def _with_examples(index: memlens.Index, one: Candidate) -> Candidate:
    examples = [trigger.text for trigger in index.triggers(one.memory, limit=3)]
    return Candidate(**{**vars(one), "examples": examples})


@dataclass(frozen=True)
class Sentence:
    """A held-out sentence with its tokens and the end of each token in the text."""

    text: str
    tokens: list[int]
    ends: list[int]

    def until(self, position: int) -> str:
        """Return the text of the prefix that ends at a position."""
        return self.text[: self.ends[position]]


def read_held_out(index: memlens.Index, model: MemoryModel, sources: Sequence[str], most: int) -> list[Sentence]:
    """Return the sentences of the text that were not scanned, each once, cut to the model's context."""
    texts = list(dict.fromkeys(unit.text for unit in islice(read_units(CorpusSettings(tuple(sources))), most)))
    seen = index.sql("SELECT text FROM {corpus} WHERE text IN (SELECT unnest($1::VARCHAR[]))", [texts])
    scanned = {row["text"] for row in seen}
    kept = [text for text in texts if text not in scanned]
    room = None if model.context is None else model.context - 1  # room for BOS
    encoded = model.tokenizer.encode(kept)
    return [Sentence(text, one.ids[:room], one.ends[:room]) for text, one in zip(kept, encoded, strict=True) if one.ids]


def batches(sentences: Sequence[Sentence]) -> Iterator[list[int]]:
    """Yield batches of sentence numbers: sentences of similar length with at most BATCH_TOKENS tokens."""
    batch: list[int] = []
    for number in sorted(range(len(sentences)), key=lambda at: len(sentences[at].tokens)):
        if batch and len(sentences[number].tokens) * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


Place = tuple[float, int, int]  # coefficient, sentence, position


def highest_places(
    model: MemoryModel, sentences: Sequence[Sentence], memories: Sequence[MemoryId], count: int
) -> dict[MemoryId, list[Place]]:
    """Return the places of each memory's highest positive coefficients, one per sentence, highest first."""
    found: dict[MemoryId, list[Place]] = {memory: [] for memory in memories}
    bos = [model.tokenizer.bos] if model.tokenizer.adds_bos else []
    for batch in batches(sentences):
        own = [sentences[number].tokens for number in batch]
        longest = max(map(len, own))
        fed = torch.tensor([[*bos, *tokens, *[0] * (longest - len(tokens))] for tokens in own])
        is_own = torch.tensor([[at < len(tokens) for at in range(longest)] for tokens in own])

        def keep(layer: int, block: CoefficientBlock, batch: list[int] = batch, is_own: Tensor = is_own) -> None:
            for memory in (one for one in memories if one.layer == layer and block.group.holds(one)):
                m = block.everywhere()[:, len(bos) :, memory.memory]
                column = m.float().cpu().masked_fill(~is_own, -math.inf)
                best, places = column.max(1)
                found[memory].extend(zip(best.tolist(), batch, places.tolist(), strict=True))

        with model.watch(keep, sorted({memory.layer for memory in memories})):
            model.run_body(fed)
    return {memory: list(islice(_in_order(model, sentences, places), count)) for memory, places in found.items()}


def _in_order(model: MemoryModel, sentences: Sequence[Sentence], places: Sequence[Place]) -> Iterator[Place]:
    """Yield places with the highest coefficients first and each prompt once.

    A prompt that the tokenizer would split in another way is left out, because a token can end within a character.
    """
    taken: set[str] = set()
    for place in sorted(places, key=lambda one: (-one[0], *one[1:])):
        sentence, position = sentences[place[1]], place[2]
        prompt = sentence.until(position)
        is_read = model.tokenizer.encode([prompt])[0].ids == sentence.tokens[: position + 1]
        if place[0] > 0 and is_read and prompt not in taken:
            taken.add(prompt)
            yield place


def measure(model: MemoryModel, candidate: Candidate, sentences: Sequence[Sentence], place: Place) -> Measured:
    """Measure the probability of the token after a prefix with and without the memory, and without each control."""
    coefficient, number, position = place
    sentence = sentences[number]
    prompt = sentence.until(position)
    seen = memlens.trace(model, prompt, token=candidate.token, top=CONTROLS + 1)
    large = [one.memory for one in seen.layers[candidate.memory.layer].by_size if one.memory != candidate.memory]
    effects = memlens.silence_each(model, prompt, [candidate.memory, *large[:CONTROLS]], token=candidate.token)
    ratios = {memory: log_ratio(effects.p, effects.p - effect) for memory, effect in effects.effects.items()}
    own = effects.effects[candidate.memory]
    others = [ratio for memory, ratio in ratios.items() if memory != candidate.memory]
    return Measured(
        prompt=prompt,
        coefficient=coefficient,
        p=effects.p,
        p_without=effects.p - own,
        control=statistics.median(others) if others else 0.0,
        is_next=sentence.tokens[position + 1 : position + 2] == [candidate.token],
    )


def find(
    index: memlens.Index, model: MemoryModel, sources: Sequence[str], count: int, prompts: int, most: int
) -> list[Finding]:
    """Return the candidates with their measurements, largest effect first."""
    candidates = find_candidates(index, count)
    if not candidates:
        return []
    sentences = read_held_out(index, model, sources, most)
    places = highest_places(model, sentences, [one.memory for one in candidates], prompts)
    found = [
        Finding(one, [measure(model, one, sentences, place) for place in places[one.memory]]) for one in candidates
    ]
    return sorted(found, key=lambda one: (-one.effect, one.candidate.memory))


def as_markdown(index: memlens.Index, finding: Finding) -> str:
    one, measured = finding.candidate, finding.measured
    lines = [
        f"## {one.memory}: {one.name}",
        "",
        f"- {one.covered} of its {one.triggers} top triggers have a pattern: {'; '.join(one.patterns[:3])}",
        *(f"  - … {text[-80:]!r}" for text in one.examples),
        f"- {one.text!r} follows {one.follows} of these triggers and is one of the {LOOKED_AT} top tokens of the value",
    ]
    if not measured:
        return "\n".join([*lines, "- the memory is never active on the held-out text", ""])
    control = statistics.median(row.control for row in measured)
    lines += [
        f"- silenced on {len(measured)} held-out prompts: p of {one.text!r} falls on {finding.fell} of them, by a "
        f"median factor of {math.exp(finding.effect):.2f}; control: {math.exp(control):.2f}",
        f"- {one.text!r} is the next token of {sum(row.is_next for row in measured)} of these prompts",
        "",
        "| held-out prompt | m | p | p without | next token? |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in measured:
        shown = row.prompt[-60:].replace("|", "\\|").replace("\n", " ")
        next_word = "yes" if row.is_next else ""
        lines.append(f"| … {shown} | {row.coefficient:.3g} | {row.p:.3g} | {row.p_without:.3g} | {next_word} |")
    best = max(measured, key=lambda row: row.effect)
    folder = str(index.folder)
    show = shlex.join(["memlens", "show", folder, str(one.memory)])
    options = ["--token", one.text, "--set", f"{one.memory}=0"]
    again = shlex.join(["memlens", "trace", *options, "--", folder, best.prompt])  # a prompt can start with a dash
    return "\n".join([*lines, "", "```", show, again, "```", ""])


def at_least_one(text: str) -> int:
    """Return the number of an option. Raises ValueError if it is less than 1."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def main(given: Sequence[str] | None = None) -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("index")
    arguments.add_argument("--held-out", nargs="+", required=True, metavar="TEXT", help="text that was not scanned")
    arguments.add_argument("--model", help="current location of the model")
    arguments.add_argument("--count", type=at_least_one, default=10, help="memories to measure")
    arguments.add_argument("--prompts", type=at_least_one, default=12, help="held-out prompts per memory")
    arguments.add_argument("--sentences", type=at_least_one, default=5000, help="number of held-out sentences to read")
    arguments.add_argument("--json", action="store_true")
    chosen = arguments.parse_args(given)
    try:
        index = memlens.open_index(chosen.index)
        found = find(
            index, index.load_model(chosen.model), chosen.held_out, chosen.count, chosen.prompts, chosen.sentences
        )
    except memlens.MemlensError as error:
        print(f"find_findings: {error}", file=sys.stderr)
        return 2
    if chosen.json:
        print(json.dumps([asdict(one) | {"effect": one.effect, "fell": one.fell} for one in found]))
    else:
        print(
            "\n".join(as_markdown(index, one) for one in found)
            or "no memory of this index has a pattern and promotes the next token"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
