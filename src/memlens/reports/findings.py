"""What an index has to tell a person: a few true sentences, each with the command that shows it.

    find_all(index)               everything that the tables of this index support, in the order of FINDERS
    find(index, "memory", ...)    some of them, by name

Every word and number comes from the index. A trend is told with the verdict that the report's table of claims gives it,
also where it is "does not appear". Findings about single memories are in memory_findings. Nothing is printed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from memlens.errors import UnknownName
from memlens.index.reader import Index
from memlens.reports.charts import in_third
from memlens.reports.claims import Claim
from memlens.reports.galleries import dead_memories
from memlens.reports.judgements import ABSENT, APPEARS, UNCLEAR, Finding
from memlens.reports.memory_findings import MEMORY_FINDERS, Finder, Material, Told
from memlens.text import percent

_KINDS = ("shallow", "semantic", "both")


def find_all(index: Index) -> list[Told]:
    """Everything that this index has to tell."""
    return find(index, *finders())


def find(index: Index, *names: str) -> list[Told]:
    """The findings of these names, in this order; what the tables of the index do not support is left out."""
    known = finders()
    for name in names:
        if name not in known:
            raise UnknownName(f"there is no finding '{name}'; known: {', '.join(known)}")
    material = Material(index)
    told = (known[name](material) for name in names)
    return [one for one in told if one is not None]


def finders() -> dict[str, Finder]:
    """All findings by name: single memories first, then what changes with depth."""
    own: dict[str, Finder] = {"settling": _settling, "depth": _depth, "composition": _composition, "dead": _dead}
    others = ("last-token", "agreement", "rank", "confident-values", "active", "confidence", "residual", "changes")
    return MEMORY_FINDERS | own | {f"claim-{slug}": _told_by(slug) for slug in others}


def claim_lines(claim: Claim, finding: Finding) -> tuple[str, ...]:
    """A claim's own numbers, the published ones, and the verdict."""
    interval = f" ({finding.interval})" if finding.interval else ""
    return f"here: {finding.yours}{interval}", f"in the paper: {claim.published}", f"verdict: {finding.verdict}"


_SAID = {APPEARS: "", ABSENT: "Not here: ", UNCLEAR: "Cannot be told here: "}


def _told_by(slug: str, extra: Callable[[Material], Iterable[str]] = lambda material: ()) -> Finder:
    """A claim of the paper as a finding; its sentence stands alone only where the claim holds."""

    def told(material: Material) -> Told | None:
        if slug not in material.claims:
            return None
        claim, finding = material.claims[slug]
        lines = (*extra(material), *claim_lines(claim, finding))
        return Told(f"claim-{slug}", _SAID[finding.verdict] + claim.text, lines, material.command_of(claim.needs))

    return told


def _renamed(name: str, told: Told | None, title: str | None = None) -> Told | None:
    return None if told is None else Told(name, title or told.title, told.lines, told.command)


def _settling(material: Material) -> Told | None:
    """Where predictions settle."""

    def when(material: Material) -> Iterable[str]:
        rows = [row for row in material.rows("refinement") if row["prefixes"]]
        few = [rows[place * (len(rows) - 1) // 3] for place in range(4)] if len(rows) > 4 else rows
        shares = ", ".join(f"{percent(row['rate'])} in layer {row['layer']}" for row in few)
        yield f"the final token is already on top of the residual for {shares}"
        half = next((row["layer"] for row in rows if row["low" if "low" in row else "rate"] >= 0.5), None)
        yield (
            "no layer begins with more than half of its predictions made, beyond doubt"
            if half is None
            else f"layer {half} is the first that begins with more than half of its predictions made, beyond doubt"
        )

    return _renamed("settling", _told_by("refinement", when)(material))


def _depth(material: Material) -> Told | None:
    """How shallow and semantic patterns change with depth."""

    def by_third(material: Material) -> Iterable[str]:
        for which in ("lower", "middle", "upper"):
            rows = in_third(material.rows("patterns"), which, material.tables.layers)
            total = sum(row["prefixes"] for row in rows)
            if total:
                kinds = (f"{percent(sum(row[kind] for row in rows) / total, 0)} {kind}" for kind in _KINDS)
                yield f"{which} third of the layers: {', '.join(kinds)}"

    return _renamed("depth", _told_by("patterns", by_third)(material))


def _composition(material: Material) -> Told | None:
    """How often a layer says what none of its memories says."""
    rows = [row for row in material.rows("composition") if row["prefixes"]]
    if not rows:
        return None
    mean = sum(row["rate"] for row in rows) / len(rows)
    title = f"{percent(mean)} of what layers predict is the prediction of none of their memories"

    def of_active(material: Material) -> Iterable[str]:
        active = [row["rate_active"] for row in rows if row.get("rate_active") is not None]
        if active:
            yield f"of none of those that fire: {percent(sum(active) / len(active))}"

    return _renamed("composition", _told_by("composition", of_active)(material), title)


def _dead(material: Material) -> Told | None:
    """Memories that no prefix of the corpus triggers."""
    layers = dead_memories(material.index)
    dead, total = sum(row.dead for row in layers), sum(row.memories for row in layers)
    if not dead:
        title = f"Every one of {total:,} memories fires somewhere in this corpus"
        return Told("dead", title, (), material.command("report"))
    most = max(layers, key=lambda row: row.share)
    title = f"{dead:,} of {total:,} memories ({percent(dead / total)}) never fire in this corpus"
    line = f"the largest share is in layer {most.layer}: {most.dead:,} of {most.memories:,}, among them {most.names[0]}"
    return Told("dead", title, (line,), material.command("report"))
