"""effects.parquet: what silencing the memories of a role changed, beside random groups, as the report shows it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import pyarrow as pa

from memlens.index.reader import Index

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


@dataclass(frozen=True)
class RoleEffect:
    """The effect of silencing the memories of a role, beside that of random groups."""

    role: str
    measure: str
    memories: int
    prefixes: int
    norm: float | None  # mean length of their values
    random_norm: float | None  # the same, of all random groups
    change: float | None  # in the mean over prefixes, in nats
    random: tuple[float, ...]  # the same, of each random group
    difference: float | None  # of the change less that of all random groups
    low: float | None  # None where there is one prefix only, or none
    high: float | None
    appears: bool | None  # None where there are no such memories, or no others to compare them with

    @property
    def verdict(self) -> str:
        if self.appears is not None:
            return "appears" if self.appears else "does not appear"
        return "nothing to compare with" if self.memories else "no such memories"


def write_effects(index: Index, effects: Sequence[RoleEffect], seed: int) -> None:
    """Into the index, bound to the roles and values that they are of."""
    rows = pa.Table.from_pylist([asdict(effect) for effect in effects], EFFECTS_SCHEMA)
    made_from = {name: index.manifest.sha256(name) for name in ("roles", "values")}
    index.write({"effects": (EFFECTS_SCHEMA, [rows])}, lambda: {"effects": {"seed": seed, "from": made_from}})


def read_effects(index: Index) -> list[RoleEffect]:
    """Empty where `memlens roles --effects` was not run since the roles were found."""
    noted = index.manifest.content.get("effects", {}).get("from", {})
    if not index.has("effects") or noted.get("roles") != index.manifest.sha256("roles"):
        return []
    rows = index.table("effects").to_pylist()
    return [RoleEffect(**{**row, "random": tuple(row["random"])}) for row in rows]
