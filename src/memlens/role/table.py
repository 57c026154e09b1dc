"""The tables roles.parquet (roles of all memories with their statistics) and effects.parquet (effects of silencing)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from memlens.index.reader import Index
from memlens.memory import ROLES
from memlens.progress import Progress, no_progress
from memlens.role.rules import LONGEST, assign, p_of_cosine, p_of_endings, p_of_part, p_of_spread

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel

_NUMBERS = (
    "norm", "variance", "skew", "kurtosis", "frequency", "along_frequency", "weak", "cos_in_out", "cos_gate_out",
    "cos_gate_in", "token_cover", "pair_cover", "position",
)  # fmt: skip
_HYPOTHESES = ("token", "n-gram", "weak", "frequency", "kurtosis", "variance", "along", "position")
_AT_ONCE = 1 << 14  # memories per table
DECOYS = 100_000  # minimum number of random directions; with fewer, rare heavy tails could not be significant
ROLES_SCHEMA = pa.schema(
    [
        ("layer", pa.int32()),
        ("memory", pa.int32()),
        ("role", pa.string()),  # first of the memory's roles in the order of memory.ROLES; null if it has no role
        ("roles", pa.list_(pa.string())),
        ("position_from", pa.int32()),  # first position of the range with the highest activation frequency, or null
        ("token", pa.int32()),  # most common last token of the triggers; null without triggers
        *((name, pa.float64()) for name in _NUMBERS),
        *((f"q_{name.replace('-', '_')}", pa.float64()) for name in _HYPOTHESES),
    ]
)
EFFECTS_SCHEMA = pa.schema(
    [
        ("role", pa.string()),
        ("measure", pa.string()),
        ("memories", pa.int32()),
        ("prefixes", pa.int32()),
        *((name, pa.float64()) for name in ("norm", "random_norm", "change")),
        ("random", pa.list_(pa.float64())),
        *((name, pa.float64()) for name in ("difference", "low", "high")),
        ("appears", pa.bool_()),
    ]
)


def compute_roles(
    index: Index,
    model: MemoryModel | str | None = None,
    *,
    rate: float = 0.01,
    seed: int = 0,
    progress: Progress = no_progress,
) -> None:
    """Write roles.parquet for every scanned layer. `model` is the scanned model or its current location."""
    model = index.load_model(model)
    notes = _notes(index, model, rate, seed)
    columns, p, decoys = _measure(index, model, notes["reading"], seed, progress)
    has, q = assign(columns, p, decoys, rate)
    index.write({"roles": (ROLES_SCHEMA, _tables(columns, has, q))}, lambda: {"roles": notes})


def roles_are_made(index: Index, model: MemoryModel, *, rate: float = 0.01, seed: int = 0) -> bool:
    """Return True if the index holds complete roles with these settings, made from its current tables."""
    return index.manifest.content.get("roles") == _notes(index, model, rate, seed) and index.is_whole("roles")


def _notes(index: Index, model: MemoryModel, rate: float, seed: int) -> dict[str, Any]:
    """Return the manifest's record of the roles: the settings, and the checksums of the tables used."""
    made_from = {name: index.manifest.sha256(name) for name in ("triggers", "counts") if index.has(name)}
    reading = index.manifest.values.reading or model.lens.readings[0]
    return {"rate": rate, "seed": seed, "reading": reading, "from": made_from}


def _measure(
    index: Index, model: MemoryModel, reading: str, seed: int, progress: Progress
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the numbers and p-values of all memories as columns, and the numbers of random directions."""
    from memlens.role.endings import CorpusEndings, count_endings, trigger_ends
    from memlens.role.positions import position_numbers
    from memlens.role.weights import ValueReader, cosines_of

    ends = {layer: count_endings(*trigger_ends(index, layer), index.memories(layer)) for layer in index.layers}
    corpus = CorpusEndings(index, np.concatenate([numbers["pair"] for numbers in ends.values()]).astype(np.int64))
    counts = corpus.frequency[: model.vocabulary]
    dead = index.arrays("SELECT dead FROM {memories} ORDER BY layer, memory")["dead"]
    decoys = max(DECOYS / len(dead), 1)  # random directions per memory
    parts, ps, kurtosis = [], [], []
    for done, layer in enumerate(index.layers):
        progress("roles", done, len(index.layers))
        memories = model.layers[layer]
        numbers: dict[str, Any] = {**ends[layer], **cosines_of(memories)}
        lens = ValueReader(model, layer, reading, counts)
        numbers |= lens.moments(memories.values)
        kurtosis.append(lens.random_kurtosis(math.ceil(memories.memories * decoys), seed))
        numbers["weak"] = lens.part_in_weak(memories.values)
        numbers["along_frequency"] = lens.along_frequency(memories.values)
        numbers["is_long"] = numbers["norm"] >= np.quantile(numbers["norm"], LONGEST)
        numbers |= {"layer": np.full(memories.memories, layer), "memory": np.arange(memories.memories)}
        at = position_numbers(index, layer)
        numbers |= {name: at[name] for name in ("position", "position_from")}
        parts.append(numbers)
        ps.append({
            "weak": p_of_part(numbers["weak"], lens.directions, lens.rank),
            "frequency": p_of_cosine(numbers["along_frequency"], model.width),
            "variance": p_of_spread(numbers["variance"], lens.eigenvalues),
            "along": p_of_cosine(numbers["cos_in_out"], model.width),
            "position": at["p"],
        })  # fmt: skip
    progress("roles", len(index.layers), len(index.layers))
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    columns["dead"] = np.asarray(dead, np.bool_)
    columns["token_count"] = corpus.tokens[columns["token"]]
    columns["pair_count"] = corpus.pair_counts(columns["pair"])
    columns["pair_token_count"] = corpus.tokens[columns["pair"] & 0xFFFFFFFF]
    p = {name: np.concatenate([part[name] for part in ps]) for name in ps[0]}
    p["token"], p["n-gram"] = p_of_endings(columns, int((counts > 0).sum()), corpus.prefixes)
    return columns, p, {"kurtosis": np.concatenate(kurtosis)}


def _tables(columns: dict[str, Any], has: dict[str, Any], q: dict[str, Any]) -> Iterator[pa.Table]:
    """Yield the rows of roles.parquet in blocks of memories."""
    for first in range(0, len(columns["memory"]), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        numbers = {name: column[part] for name, column in columns.items()}
        roles = [[role for role in ROLES if has[role][row]] for row in range(first, first + len(numbers["memory"]))]
        table = {name: numbers[name] for name in ("layer", "memory", *_NUMBERS)}
        table |= {f"q_{name.replace('-', '_')}": q[name][part] for name in _HYPOTHESES}
        table["role"] = pa.array([names[0] if names else None for names in roles], pa.string())
        table["roles"] = pa.array(roles, pa.list_(pa.string()))
        table["token"] = pa.array(numbers["token"], pa.int32(), mask=numbers["triggers"] == 0)
        table["position"] = pa.array(numbers["position"], pa.float64(), mask=np.isnan(numbers["position"]))
        table["position_from"] = pa.array(numbers["position_from"], pa.int32(), mask=numbers["position_from"] < 0)
        arrays = {field.name: pa.array(table[field.name]).cast(field.type) for field in ROLES_SCHEMA}
        yield pa.table(arrays, ROLES_SCHEMA)


@dataclass(frozen=True)
class LayerRoles:
    """The number of a layer's memories with each role. A memory with several roles counts once for each role."""

    layer: int
    memories: int
    none: int
    roles: dict[str, int]


def roles_by_layer(index: Index) -> list[LayerRoles]:
    rows = index.sql(
        """SELECT layer, count(*) AS memories, count(*) FILTER (role IS NULL) AS none,
                  flatten(list(roles)) AS roles FROM {roles} GROUP BY layer ORDER BY layer"""
    )
    return [
        LayerRoles(row["layer"], row["memories"], row["none"], {role: row["roles"].count(role) for role in ROLES})
        for row in rows
    ]


@dataclass(frozen=True)
class RoleEffect:
    """The effect of silencing the memories of a role, compared with random groups."""

    role: str
    measure: str
    memories: int
    prefixes: int
    norm: float | None  # mean length of the memories' values
    random_norm: float | None  # mean length over all random groups
    change: float | None  # mean change of the measure over prefixes, in nats
    random: tuple[float, ...]  # mean change for each random group
    difference: float | None  # mean change minus the mean over random groups
    low: float | None  # ends of the interval of `difference`; None for fewer than two prefixes
    high: float | None
    appears: bool | None  # None if no memory has the role, or if there are no other memories to compare with

    @property
    def verdict(self) -> str:
        if self.appears is not None:
            return "appears" if self.appears else "does not appear"
        return "no memories to compare with" if self.memories else "no such memories"


def write_effects(index: Index, effects: Sequence[RoleEffect], seed: int) -> None:
    """Write effects.parquet, and record the checksums of the roles and values from which effects were computed."""
    rows = pa.Table.from_pylist([asdict(effect) for effect in effects], EFFECTS_SCHEMA)
    made_from = {name: index.manifest.sha256(name) for name in ("roles", "values")}
    index.write({"effects": (EFFECTS_SCHEMA, [rows])}, lambda: {"effects": {"seed": seed, "from": made_from}})


def read_effects(index: Index) -> list[RoleEffect]:
    """Return the effects, or an empty list if `memlens roles --effects` was not run for the current roles."""
    noted = index.manifest.content.get("effects", {}).get("from", {})
    if not index.has("effects") or noted.get("roles") != index.manifest.sha256("roles"):
        return []
    rows = index.table("effects").to_pylist()
    return [RoleEffect(**{**row, "random": tuple(row["random"])}) for row in rows]
