"""Roles in the report: the share of memories with each role by depth, beside what was published of other models."""

from dataclasses import dataclass

from memlens.experiments.verdicts import THIRDS, third
from memlens.index.reader import Index
from memlens.memory import ROLES
from memlens.role.effect_table import RoleEffect, read_effects
from memlens.role.table import roles_by_layer

# The authors count differently, and few print shares: what they say of depth stands beside the numbers.
PUBLISHED = {
    "dead": "more than 70% in some lower layers of OPT-66B (Voita et al. 2023)",
    "token": "many in the lower half of OPT (Voita et al. 2023)",
    "n-gram": "in the lower half of OPT (Voita et al. 2023)",
    "positional": "indicators of position ranges in small OPT models, less explicit in large ones (Voita et al. 2023)",
    "entropy": "a few, in the last layers (Stolfo et al. 2024)",
    "token-frequency": "a few, in the last layers (Stolfo et al. 2024)",
    "prediction": "from the middle of GPT-2 on (Gurnee et al. 2024)",
    "suppression": "in the last layers of GPT-2 (Gurnee et al. 2024)",
    "enrichment": "in lower and middle layers (Gerstner and Schütze 2025)",
    "depletion": "in the last layers (Gerstner and Schütze 2025)",
}


@dataclass(frozen=True)
class RoleShare:
    """One role: how many memories have it, as shares of the memories of each third of the layers and of all."""

    role: str
    count: int
    shares: tuple[float | None, ...]  # lower, middle, upper; None where no layer of a third was scanned
    share: float
    published: str


@dataclass(frozen=True)
class RoleSection:
    """Roles that were looked for, counts by layer, and what silencing them changed."""

    roles: list[RoleShare]
    by_layer: list[dict[str, int]]
    none: float  # share of memories without a role
    not_asked: tuple[str, ...]  # roles that this index cannot tell of: without gates, or without counts by position
    effects: list[RoleEffect]  # none before `memlens roles --effects`


def role_section(index: Index) -> RoleSection | None:
    """None where `memlens roles` was not run. A memory with several roles counts for each."""
    if not index.has("roles"):
        return None
    layers = roles_by_layer(index)
    depth = len(index.manifest.model.memories)
    groups = [[layer for layer in layers if third(layer.layer, depth) == which] for which in THIRDS]
    not_asked = _not_asked(index)
    rows = []
    for role in ROLES:
        counts = [(sum(layer.roles[role] for layer in some), sum(layer.memories for layer in some)) for some in groups]
        count, total = (sum(column) for column in zip(*counts, strict=True))
        if role not in not_asked:
            shares = tuple(found / of if of else None for found, of in counts)
            rows.append(RoleShare(role, count, shares, count / total, PUBLISHED.get(role, "")))
    none = sum(layer.none for layer in layers) / sum(layer.memories for layer in layers)
    counted = [
        {"layer": layer.layer, "memories": layer.memories, **layer.roles, "none": layer.none} for layer in layers
    ]
    return RoleSection(rows, counted, none, not_asked, read_effects(index))


def _not_asked(index: Index) -> tuple[str, ...]:
    """A role that no memory has is a result; one that could not be looked for is none."""
    (known,) = index.sql("SELECT count(position) AS positions, min(q_along) AS along FROM {roles}")
    gated = ("enrichment", "depletion") if known["along"] == 1 else ()  # asked of no memory
    return gated if known["positions"] else ("positional", *gated)
