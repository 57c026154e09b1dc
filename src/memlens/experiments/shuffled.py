"""The paper's claims in shuffled networks (beyond the paper): what networks of this shape show without training.

1. Select the first tokens of the scanned text, and the layers to which claims refer: the first two layers, the last
   layer of the lower third, the layer where the paper's curve of predictions bends, and the last layer.
2. Scan this text with these layers. Compute values, patterns and the experiments with small samples, and judge the
   claims. Store the number on which each claim is judged.
3. Repeat step 2 with the weight matrices of the model shuffled, for several seeds (models/shuffle.py).

The trained network is measured again because most numbers depend on the amount of text. A claim appears only if its
number exceeds that of the shuffled networks (`experiment.exceeds`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from memlens.experiments import experiment as ex
from memlens.index.reader import Index
from memlens.progress import Progress, no_progress
from memlens.settings import CorpusSettings, PatternSettings
from memlens.stats import Estimate

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel

TOKENS = 10_000
NETWORKS = 6  # number of shuffled networks; fewer would give a poor estimate of the variation between them
SAMPLES = {"local-edits": 8}  # experiment -> number of sampled memories per layer
PREFIXES = 500
SHIPPED = Path(__file__).parents[1] / "bundled" / "shuffled.json"  # precomputed rows for the demo

SCHEMA = ex.schema(
    "claim:string seed:int32 tokens:int64 value low high",  # the claim's number in a shuffled network, and its interval
    "trained trained_low trained_high",  # the same in the trained network, on the same text and layers
)


def compute(
    index: Index,
    model: MemoryModel,
    *,
    seed: int = 0,
    sample: int | None = TOKENS,
    progress: Progress = no_progress,
) -> list[ex.Row]:
    """Return one row per claim and shuffled network. `sample` is the number of tokens of text.

    For the demo, the rows are read from SHIPPED (written by training/shuffled.py) if they have the same inputs.
    """
    from memlens.models.shuffle import shuffled_weights

    rows = []
    with TemporaryDirectory(prefix="memlens-shuffled-") as folder:
        text = Path(folder) / "text.jsonl"
        tokens = write_part(index, text, sample)
        inputs = digest_inputs(index, model, text, seed)
        shipped = json.loads(SHIPPED.read_text("utf-8")) if SHIPPED.exists() else {}
        if shipped.get("inputs") == inputs:
            return list(shipped["rows"])
        progress("shuffled", 0, NETWORKS + 1)
        trained = measure_claims(index, model, text, Path(folder) / "trained")
        for number in range(NETWORKS):
            progress("shuffled", number + 1, NETWORKS + 1)
            with shuffled_weights(model, seed + number):
                shuffled = measure_claims(index, model, text, Path(folder) / str(number))
            rows += [
                {"claim": claim, "seed": seed + number, "tokens": tokens, "value": value, "low": low, "high": high}
                | dict(zip(("trained", "trained_low", "trained_high"), trained[claim], strict=True))
                for claim, (value, low, high) in shuffled.items()
                if claim in trained
            ]
    progress("shuffled", NETWORKS + 1, NETWORKS + 1)
    return rows


def digest_inputs(index: Index, model: MemoryModel, text: Path, seed: int) -> str:
    """Return a digest of the inputs that determine the rows: model, text, settings, seed and sample sizes.

    Threads and batches are left out, because they change only the last bits of numbers.
    """
    patterns, values = index.manifest.patterns, index.manifest.values
    settings = replace(index.manifest.settings, threads=1, batch_tokens=1, max_tokens=None, layers=None)
    inputs = [
        model.fingerprint(),
        text.read_text("utf-8"),
        [*chosen_layers(index)],
        asdict(settings),
        [values.top, values.reading, values.vocabulary],
        [patterns.settings, "states" in patterns.content] if patterns else None,
        [seed, NETWORKS, PREFIXES, SAMPLES],
    ]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()


def write_part(index: Index, path: Path, tokens: int | None) -> int:
    """Write the first sentences with at least `tokens` tokens in total, one record per document.

    Returns the number of tokens written.
    """
    documents: dict[str, list[str]] = {}
    count = 0
    for row in index.stream("SELECT text, source, len(tokens) AS tokens FROM {corpus} ORDER BY sentence"):
        documents.setdefault(row["source"], []).append(row["text"])
        count += row["tokens"]
        if tokens is not None and count >= tokens:
            break
    lines = [json.dumps({"text": " ".join(sentences)}) + "\n" for sentences in documents.values()]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")
    return count


def chosen_layers(index: Index) -> tuple[int, ...]:
    """Return the scanned layers on which the claims are measured."""
    depth = len(index.manifest.model.memories)
    lower = [layer for layer in range(depth) if ex.third(layer, depth) == "lower"]
    bend = min(range(depth), key=lambda layer: abs(ex.depth(layer, depth) - ex.BEND))
    return tuple(sorted({0, 1, max(lower, default=0), bend, depth - 1} & {*index.layers}))


def measure_claims(index: Index, model: MemoryModel, text: Path, folder: Path) -> dict[str, Estimate]:
    """Return {claim: the number on which it is judged} for a model on this text. Leaves out claims without a number."""
    return {
        judged.claim.slug: judged.judgement.measure
        for judged in judge_part(index, model, text, folder)
        if judged.claim.is_compared and judged.judgement and judged.judgement.measure
    }


def judge_part(index: Index, model: MemoryModel, text: Path, folder: Path) -> Iterator[ex.JudgedClaim]:
    """Analyze this text in a new folder with small samples, and yield every claim judged by its rule alone."""
    from memlens.experiments.run import EXPERIMENTS, run
    from memlens.index.build import build_index
    from memlens.pattern.table import compute_patterns
    from memlens.vocab.table import compute_values

    settings = replace(index.manifest.settings, layers=chosen_layers(index), max_tokens=None)
    build_index(model, CorpusSettings((str(text),)), settings, folder)
    part, values = Index(folder), index.manifest.values
    compute_values(
        part, model, top=values.top or 50, reading=values.reading or None, vocabulary=values.vocabulary or "all"
    )
    note = index.manifest.patterns
    has_states = note is not None and "states" in note.content
    pattern_settings = PatternSettings(**note.settings) if note else PatternSettings()
    compute_patterns(part, pattern_settings, model=model if has_states else None)
    for experiment in EXPERIMENTS.values():
        if experiment.claims and experiment.obstacle(part) is None:
            size = PREFIXES if experiment.on_prefixes else SAMPLES.get(experiment.name, experiment.sample)
            run(part, experiment.name, model, sample=size)
            yield from experiment.judge_rules(part, lambda name: part.table(f"experiments/{name}").to_pylist())


def print_networks(index: Index, tables: ex.Rows, width: int, origin: str) -> tuple[str, list[Any]]:
    """Return a table with the number of each claim in the trained network and in the shuffled networks."""
    from memlens.experiments.run import EXPERIMENTS
    from memlens.text import plain_table

    rows = tables[ex.SHUFFLED]
    claims = {claim.slug: claim for experiment in EXPERIMENTS.values() for claim in experiment.claims}
    table = plain_table(["claim", "trained", "shuffled"])
    for slug in dict.fromkeys(row["claim"] for row in rows):
        of_claim = [row for row in rows if row["claim"] == slug]
        write = claims[slug].write
        values = ", ".join(write(row["value"]) for row in of_claim)
        table.add_row(claims[slug].text, write(of_claim[0]["trained"]), values)
    tokens = rows[0]["tokens"] if rows else 0
    return f"{len({row['seed'] for row in rows})} shuffled networks, {tokens:,} tokens", [table]


EXPERIMENT = ex.Experiment(
    "shuffled",
    "beyond the paper",
    "The paper's claims in networks with shuffled weights",
    (
        ex.ResultTable(
            ex.SHUFFLED,
            SCHEMA,
            compute,
            question="What would a network without training show?",
            lead="The numbers on which claims are judged, in networks with shuffled weight matrices.",
            how="The first part of the text is scanned again with a few layers of the model, and with the same "
            "network after the entries of every weight matrix were shuffled. Embeddings, unembedding, norms and "
            "biases stay the same. The same experiments run on both, with small samples. A claim appears only if its "
            "number exceeds that of the shuffled networks by more than the errors of both and the variation between "
            "shuffled networks, which one more network would exceed in 5% of cases.",
        ),
    ),
    sample_of="tokens of the text",
    sample=TOKENS,
    needs=("values",),
    uses_model=True,
    terminal=print_networks,
)
