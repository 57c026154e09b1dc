"""Patterns (Figure 2): the kinds of pattern of the trigger prefixes of a layer.

A prefix is shallow, semantic, both or not covered, depending on the patterns listed for it. Automatic patterns are
counted for all memories (or a sample), people's patterns for the memories they labeled, separately for each person who
has finished. Intervals are over memories, because the prefixes of one memory are not independent. If all memories are
equal, they are Wilson intervals with memories as observations.

Automatic patterns divide the semantic prefixes: `beyond` if one of their patterns was tested against prefixes with the
same last tokens (topics), otherwise `implied` by the last word (its class or list names a subject, such as months;
classes of function words are wording). `paper_kinds` counts only patterns of the kinds that the paper's annotators
used: recurring words and subjects, without forms of words, positions in the sentence or lists of function words.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memlens.annotations.records import LABELS, Annotations
from memlens.experiments import experiment as ex
from memlens.experiments.prefixes import STOP_LISTS
from memlens.index.reader import Index
from memlens.pattern.table import describe_chance
from memlens.pattern.words import NEXT
from memlens.progress import Progress, no_progress
from memlens.stats import Estimate, draw as draw_sample, generator, ratio_estimate, share_interval, wilson
from memlens.text import cut_right, percent, plain_table, visible

KINDS = ("shallow", "semantic", "both", "not_covered")
SHALLOW, IMPLIED, BEYOND = "shallow", "implied", "beyond"  # bands of patterns
HUES = {"shallow": "c1", "both": "c3", "semantic": "c2", "not_covered": "c5"}
BANDS = {"shallow": "c1", "both": "c3", "implied by the last word": "c4", "beyond the last word": "c2"} | {
    "not_covered": "c5"
}
WORDINGS = ("ending", "n-gram", "frame")  # patterns of recurring words
GRAMMAR = frozenset(
    (
        "a personal pronoun", "a possessive", "a relative or question word", "a modal verb", "a form of be",
        "a form of have", "an article", "a demonstrative", "a preposition", "a conjunction", "a word of amount",
        "a word of frequency", "a word of degree", "a word of approximation", "a closing mark", "a mark",
    )
)  # fmt: skip # lists of words without a subject
READERS = (
    "Subjects are partly read into any text: a reader who did not know which triggers were real named 66 subjects for "
    "triggers that had been swapped for prefixes with the same last tokens, and 75 to 80 for the real ones."
)
_PAPER_KINDS = {"shallow": "shallow", "shallow+semantic": "both", "semantic": "semantic", "not-covered": "not_covered"}
_NAME = 15  # width of an annotator's name in the terminal
_TOP = 25
_EVERY = 0.95

_COLUMNS = (
    "layer:int32 memories:int64 patterned_memories:int64",  # patterned_memories: those with at least one pattern
    "patterns:int64 prefixes:int64",
    *(f"{kind}:int64" for kind in KINDS),
    *(f"{kind}_{edge}" for kind in KINDS for edge in ("low", "high")),
    "each each_low each_high",  # number of patterns per memory
)
SCHEMA = ex.schema(
    *_COLUMNS,
    "implied:int64 beyond:int64",  # parts of `semantic`
    *(f"{kind}_{edge}" for kind in (IMPLIED, BEYOND) for edge in ("low", "high")),
    "paper_kinds_memories:int64 paper_kinds:int64 paper_kinds_low paper_kinds_high",  # memories, prefixes, their share
    "senses auroc auroc_same_token",  # senses: mean over memories with a pattern; others: means over patterns
    *ex.kind_columns("memories:int64", "patterned_memories:int64", "patterned", "low", "high"),  # in a mixture
)
PEOPLE_SCHEMA = ex.schema("annotator:string", *_COLUMNS)


class Listed(NamedTuple):
    """A pattern of a memory."""

    band: str  # SHALLOW, IMPLIED or BEYOND
    ranks: Iterable[int]  # ranks of triggers with the pattern
    is_of_paper: bool = True  # whether the paper's annotators used this kind


def compute(
    index: Index, model: Any = None, *, seed: int = 0, sample: int | None = None, progress: Progress = no_progress
) -> list[ex.Row]:
    """Return automatic patterns: one row per layer, for `sample` memories of each or all that have triggers."""
    top = index.manifest.patterns.top if index.manifest.patterns else _TOP
    rows = []
    for layer in ex.layers_of(index, "patterns", progress):
        random = generator(seed, "patterns", layer)
        filled = _filled(index, layer, top)
        chosen = draw_sample(np.array(sorted(filled), np.int64), sample, random).tolist()
        listed: dict[int, list[Listed]] = {memory: [] for memory in chosen}
        found = []
        for row in index.stream("SELECT * FROM {patterns} WHERE layer = $1 AND kind <> $2", [layer, NEXT]):
            if row["memory"] in listed:
                listed[row["memory"]].append(Listed(band_of(row), row["prefixes"], is_of_paper(row)))
                found.append(row)
        memories = [(filled[m], patterns) for m, patterns in listed.items()]
        rows.append({"layer": layer, **_summary(memories, random), **_divided(memories, random), **_scores(found)})
        for kind, span in ex.kind_spans(index.names, layer).items():
            rows[-1] |= ex.of_kind(
                kind, _patterned([patterns for memory, patterns in listed.items() if memory in span])
            )
    return rows


def band_of(pattern: ex.Row) -> str:
    """Return the band of a pattern: SHALLOW, IMPLIED or BEYOND."""
    kind, _, name = pattern["pattern"].partition(":")
    if pattern["kind"] == "semantic":
        return BEYOND
    if kind == "list":
        return SHALLOW if name in GRAMMAR else IMPLIED
    if kind != "class":
        return SHALLOW
    # "ends with a month: may, june" or "ends with a word like barge, ferry"
    before, _, words = pattern["description"].rpartition(": ")
    if before:
        return SHALLOW if before.removeprefix("ends with ") in GRAMMAR else IMPLIED
    examples = [word.strip() for word in words.partition(" like ")[2].split(",")]
    contents = [word for word in examples if len(word) > 1 and word.isalpha() and word.lower() not in STOP_LISTS["en"]]
    return IMPLIED if 2 * len(contents) > len(examples) else SHALLOW


def is_of_paper(pattern: ex.Row) -> bool:
    """Return True for recurring words and subjects, the kinds that the paper's annotators used."""
    return band_of(pattern) != SHALLOW or pattern["pattern"].partition(":")[0] in WORDINGS


def _patterned(memories: Sequence[Sequence[Listed]]) -> ex.Row:
    """Count the memories that have a pattern, with their share and its interval."""
    count, patterned = len(memories), sum(bool(listed) for listed in memories)
    low, high = share_interval(patterned, count)
    share = patterned / count if count else None
    return {"memories": count, "patterned_memories": patterned, "patterned": share, "low": low, "high": high}


def _scores(patterns: Sequence[ex.Row]) -> ex.Row:
    """Return senses per memory with patterns, and mean scores on held-out triggers."""
    senses = {(row["memory"], row.get("sense")) for row in patterns}
    memories = {memory for memory, _ in senses}
    means: ex.Row = {"senses": len(senses) / len(memories) if memories else None}
    for name in ("auroc", "auroc_same_token"):
        known = [row[name] for row in patterns if row.get(name) is not None]
        means[name] = sum(known) / len(known) if known else None
    return means


def compute_people(
    index: Index, model: Any = None, *, seed: int = 0, sample: int | None = None, progress: Progress = no_progress
) -> list[ex.Row]:
    """Return people's patterns: one row per layer and person who has finished."""
    annotations = Annotations(index)
    labels, drawn = annotations.labels(), annotations.sample
    top = drawn.top if drawn else _TOP
    rows = []
    for number, person in enumerate(sorted({label.annotator for label in labels})):
        for layer in index.layers:
            of_layer = [label for label in labels if label.annotator == person and label.memory.layer == layer]
            if of_layer:
                filled = _filled(index, layer, top)
                memories: list[tuple[int, list[Listed]]] = [
                    (
                        filled.get(label.memory.memory, 0),
                        [Listed(SHALLOW if p.kind == SHALLOW else BEYOND, p.prefixes) for p in label.patterns],
                    )
                    for label in of_layer
                ]
                random = generator(seed, f"patterns-people-{number}", layer)
                rows.append({"annotator": person, "layer": layer, **_summary(memories, random)})
    return rows


def _filled(index: Index, layer: int, top: int) -> dict[int, int]:
    """Return {memory with triggers: number of its first `top` triggers} of a layer."""
    query = (
        """SELECT memory, count(*) AS n FROM {triggers} WHERE layer = $1 AND "end" = 'top' AND rank < $2 GROUP BY 1"""
    )
    return {row["memory"]: row["n"] for row in index.sql(query, [layer, top])}


def _summary(memories: list[tuple[int, list[Listed]]], random: np.random.Generator) -> ex.Row:
    counts = np.array([_kinds(filled, listed) for filled, listed in memories], np.int64).reshape(-1, len(KINDS))
    low, high = _intervals(counts, random)
    row: ex.Row = {
        "memories": len(memories),
        "patterned_memories": sum(bool(listed) for _, listed in memories),
        "patterns": sum(len(listed) for _, listed in memories),
        "prefixes": int(counts.sum()),
    }
    for place, kind in enumerate(KINDS):
        row |= {kind: int(counts[:, place].sum()), f"{kind}_low": low[place], f"{kind}_high": high[place]}
    listed = np.array([len(listed) for _, listed in memories])
    each = ratio_estimate(listed, np.ones(len(memories)), random, bounds=None)
    return row | ex.estimate_columns("each", each)


def _divided(memories: list[tuple[int, list[Listed]]], random: np.random.Generator) -> ex.Row:
    """Divide the semantic prefixes into IMPLIED and BEYOND, and count patterns of the paper's kinds."""
    counts = np.array([_divide(listed) for _, listed in memories], np.int64).reshape(-1, 3)
    wholes = np.array([filled for filled, _ in memories], np.int64)
    row: ex.Row = {"paper_kinds_memories": sum(any(one.is_of_paper for one in listed) for _, listed in memories)}
    for name, column in zip((IMPLIED, BEYOND, "paper_kinds"), counts.T, strict=True):
        share = ratio_estimate(column, wholes, random)
        low, high = (None, None) if share is None else (max(share.low, 0.0), min(share.high, 1.0))
        row |= {name: int(column.sum()), f"{name}_low": low, f"{name}_high": high}
    return row


def _ranks(listed: list[Listed], *bands: str) -> set[int]:
    return {rank for one in listed if one.band in bands for rank in one.ranks}


def _divide(listed: list[Listed]) -> list[int]:
    """Count a memory's prefixes that are semantic only, IMPLIED and BEYOND, and those of the paper's kinds."""
    beyond = _ranks(listed, BEYOND) - _ranks(listed, SHALLOW)
    implied = _ranks(listed, IMPLIED) - _ranks(listed, SHALLOW) - beyond
    return [len(implied), len(beyond), len({rank for one in listed if one.is_of_paper for rank in one.ranks})]


def _kinds(filled: int, listed: list[Listed]) -> list[int]:
    """Count a memory's prefixes of each kind, in the order of KINDS."""
    shallow, semantic = _ranks(listed, SHALLOW), _ranks(listed, IMPLIED, BEYOND)
    covered = [len(shallow - semantic), len(semantic - shallow), len(shallow & semantic)]
    return [*covered, filled - sum(covered)]


def _intervals(counts: NDArray[np.int64], random: np.random.Generator) -> tuple[list[Any], list[Any]]:
    """Return 95% intervals of the shares of kinds, from counts [memories, kinds]."""
    shares = [ratio_estimate(column, counts.sum(1), random) for column in counts.T]
    return [share and max(share.low, 0.0) for share in shares], [share and min(share.high, 1.0) for share in shares]


def published() -> list[ex.Row]:
    shares = ex.paper_figures()["fig2_pct"]
    return [
        {"layer": layer} | {ours: shares[theirs][layer] / 100 for theirs, ours in _PAPER_KINDS.items()}
        for layer in range(ex.PAPER_LAYERS)
    ]


def draw(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    from memlens.experiments.charts import PAPER, YOURS, stacked_panel

    text = f"Kinds of pattern of trigger prefixes, {YOURS}, by depth"
    names = dict(zip(BANDS, (SHALLOW, "both", IMPLIED, BEYOND, "not_covered"), strict=True))
    divided = [
        row | {f"{band}{edge}": row[f"{name}{edge}"] for band, name in names.items() for edge in ("", "_low", "_high")}
        for row in rows
    ]
    return [
        stacked_panel("patterns", divided, "pattern", BANDS, YOURS, model.layers, text),
        _panel("patterns-paper", published(), PAPER, ex.PAPER_LAYERS),
        *ex.draw_kinds(
            "patterns",
            rows,
            "patterned",
            "share of memories with a pattern, by kind",
            ".0%",
            "Memories with a pattern",
            model,
        ),
    ]


def draw_people(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    """Plot one panel per person."""
    people = list(dict.fromkeys(row["annotator"] for row in rows))
    return [
        _panel(
            f"patterns-people-{number}",
            [row for row in rows if row["annotator"] == person],
            visible(person),
            model.layers,
        )
        for number, person in enumerate(people)
    ]


def _panel(name: str, rows: list[ex.Row], whose: str, layers: int) -> ex.Panel:
    from memlens.experiments.charts import stacked_panel

    text = f"Kinds of pattern of trigger prefixes, {whose}, by depth"
    return stacked_panel(name, rows, "pattern", HUES, whose, layers, text)


def by_layer(rows: Sequence[ex.Row]) -> list[ex.Row]:
    """Return the rows with counts of prefixes as shares."""
    parts = (IMPLIED, BEYOND, "paper_kinds")
    totals = [sum(row[kind] for kind in KINDS) for row in rows]
    return [
        ex.part_shares(row, KINDS) | {part: row[part] / total for part in parts if total and row.get(part) is not None}
        for row, total in zip(rows, totals, strict=True)
    ]


_CELLS = (
    *(ex.Column(kind, kind, interval=(f"{kind}_low", f"{kind}_high")) for kind in ("shallow", "semantic")),
    ex.Column("both", "both"),
    ex.Column("not covered", "not_covered"),
)
_DIVIDED = (
    _CELLS[0],
    ex.Column("both", "both"),
    ex.Column("implied", IMPLIED, interval=(f"{IMPLIED}_low", f"{IMPLIED}_high")),
    ex.Column("beyond", BEYOND, interval=(f"{BEYOND}_low", f"{BEYOND}_high")),
    ex.Column("not covered", "not_covered"),
)


def print_people(tables: ex.Rows) -> list[Any]:
    """Print the labels of people who have finished."""
    from rich.text import Text

    people = by_layer(tables.get("patterns-people", ()))
    if not people:
        return []
    table = plain_table(["annotator", ">layer", ">memories", *(f">{column.head}" for column in _CELLS)])
    for row in people:
        cells = [str(row["layer"]), f"{row['memories']:,}", *(column.cell(row) for column in _CELLS)]
        table.add_row(Text(cut_right(visible(row["annotator"]), _NAME)), *cells)
    return ["labels of people who have finished", table]


def false_discoveries(index: Index, rows: list[ex.Row]) -> tuple[str, str] | None:
    noted = index.manifest.patterns
    return ("false discoveries", " ".join(describe_chance(noted))) if noted else None


def rate_of_chance(index: Index) -> str:
    noted = index.manifest.patterns
    return (
        f"false discovery rate {noted.rate:.2g}; implied and beyond: semantic by or beyond the last word"
        if noted
        else ""
    )


def _trends(evidence: ex.Evidence, kind: str) -> list[ex.Trend | None]:
    """Return the trend of the share of a kind, here and in the paper."""
    both = (replace(one, rows=by_layer(one.rows)) for one in (evidence, evidence.theirs))
    return [one.trend(kind, f"{kind}_low", f"{kind}_high") for one in both]


def shallow_falls(evidence: ex.Evidence) -> ex.Judgement:
    yours, theirs = _trends(evidence, SHALLOW)
    first = replace(evidence, rows=by_layer(evidence.rows)).first(SHALLOW)
    return ex.judge_trend(yours, theirs, -1, percent(first))


def semantic_rises(evidence: ex.Evidence) -> ex.Judgement:
    """Judge the direction on subjects beyond the last word, and the size on all semantic prefixes.

    The paper's annotators did not separate the two.
    """
    rows = by_layer(evidence.rows)
    kind = BEYOND if rows and BEYOND in rows[0] else "semantic"  # the paper reports only the sum
    (beyond, _), (yours, theirs) = _trends(evidence, kind), _trends(evidence, "semantic")
    if yours is None or theirs is None:
        return ex.NOT_MEASURED
    judged = ex.judge_trend(beyond, theirs, 1, percent(replace(evidence, rows=rows).first(kind)))
    small = ex.direction(yours.slope, theirs.slope.value) != ex.APPEARS
    verdict = ex.PARTLY if judged.verdict == ex.APPEARS and small else judged.verdict
    upper = [row for row in ex.in_third(rows, "upper", evidence.layers) if row["semantic"] is not None]
    more = sum(row["semantic"] - row["shallow"] for row in upper) / max(len(upper), 1)
    return replace(judged, verdict=verdict).and_also(
        f"with subjects that the last word implies {ex.as_points(yours.change)}; "
        f"semantic minus shallow in the upper third {ex.as_points(more)}"
    )


def every_key_has_one(evidence: ex.Evidence) -> ex.Judgement:
    rows = ex.known_rows(evidence.rows, (), "memories")
    if not rows or any(row.get("paper_kinds_memories") is None for row in rows):
        return ex.NOT_MEASURED
    patterned, memories = ex.pooled(rows, "paper_kinds_memories", "memories")
    share = Estimate(patterned / memories, *wilson(patterned, memories))
    judged = ex.judge_share(share, _EVERY, "the threshold for “every”", 1.0, f"{patterned:,} of {memories:,}")
    of_any_kind = percent(ex.pooled(rows, "patterned_memories", "memories")[0] / memories)
    return judged.and_also(f"with the other kinds of memlens: {of_any_kind}")


def patterns_a_key(evidence: ex.Evidence) -> ex.Judgement:
    known = [estimate for row in evidence.rows if (estimate := ex.prefix_estimate([row], "each"))]
    if not known:
        return ex.NOT_MEASURED
    mean = ex.mean_of(known)
    return ex.Judgement(
        f"{mean.value:.2f} per key",
        f"{mean.low:.2f} to {mean.high:.2f}",
        ex.NOT_JUDGED,
        "The number of patterns depends on the kinds that are looked for and on how fine they are, so it is shown "
        "without a verdict.",
        mean,
    )


def triggers_are_covered(evidence: ex.Evidence) -> ex.Judgement:
    rows = by_layer(evidence.rows)
    shares = [
        share for row in rows if (share := ex.estimate_of(row, "paper_kinds", "paper_kinds_low", "paper_kinds_high"))
    ]
    if not shares:
        return ex.NOT_MEASURED
    mean, least, most = ex.mean_of(shares), *(ex.paper_statement(f"covered_{end}") for end in ("least", "most"))
    judged = ex.judge_share(mean, least, "the lowest published share", None, f"{percent(mean.value)} of triggers")
    thirds = [ex.in_third(rows, which, evidence.layers) for which in ex.THIRDS]
    by_third = " / ".join(percent(sum(row["paper_kinds"] for row in some) / len(some), 0) for some in thirds if some)
    of_any_kind = percent(1 - sum(row["not_covered"] for row in rows) / len(rows))
    judged = judged.and_also(f"by thirds of the layers: {by_third}; with the other kinds of memlens: {of_any_kind}")
    return judged.and_also(f"above the highest published share, {percent(most, 0)}") if mean.low > most else judged


EXPERIMENT = ex.Experiment(
    "patterns",
    "Figure 2",
    "Kinds of pattern of trigger prefixes",
    (
        ex.ResultTable(
            "patterns",
            SCHEMA,
            compute,
            question="What kind of pattern do triggers share?",
            lead="In the paper, keys of lower layers detect wordings and keys of upper layers detect subjects. A "
            "subject is implied by the last word if that word names it, as a month does.",
            how="A pattern is a property that at least three of a memory’s strongest trigger prefixes share: shallow "
            "for a recurring wording, semantic for a recurring subject. A prefix is shallow, semantic, both or not "
            "covered, depending on its patterns. In the paper, people labeled ten memories per layer; memlens finds "
            "patterns automatically for every memory, so the procedures differ. A subject counts only beyond what the "
            "last tokens imply: triggers are compared with prefixes of other documents that have the same last tokens. "
            "AUROC, mean over patterns: how well a pattern separates held-out triggers from random prefixes, and from "
            "prefixes with the same last tokens. Intervals over memories, because the prefixes of one memory are not "
            "independent. The false discovery rate is controlled for the whole model (Benjamini and Hochberg).",
            draw=draw,
            published=published,
            contract=("layer", "prefixes", "patterned_memories", *KINDS, IMPLIED, BEYOND, "paper_kinds"),
            note=false_discoveries,
            below=READERS,
        ),
        ex.ResultTable(
            "patterns-people",
            PEOPLE_SCHEMA,
            compute_people,
            question="What kind of pattern do people see?",
            lead="The same shares from the labels of people who have finished, one chart per person.",
            how="People describe patterns of sampled memories, each with at least three prefixes, as shallow or "
            "semantic, and mark the prefixes. They see other labels only after finishing. Intervals over the person’s "
            "memories.",
            draw=draw_people,
            command="memlens annotate INDEX sample",
            by_people=True,
        ),
    ),
    needs=("patterns",),
    people=LABELS,
    claims=(
        ex.Claim(
            "shallow",
            "Upper layers hold fewer shallow patterns than lower ones",
            "49% of prefixes in layers 0–4, 17% in layers 11–15",
            "Share of prefixes that are shallow only, by layer. " + ex.RULE_OF_TRENDS,
            shallow_falls,
            sign=-1,
        ),
        ex.Claim(
            "semantic",
            "Upper layers hold more semantic patterns than lower ones",
            "11% of prefixes in layers 0–4, 39% in layers 11–15",
            "Direction: share of prefixes whose subject goes beyond the last word. "
            + ex.RULE_OF_TRENDS
            + " Size: the slope of all semantic prefixes, with subjects that the last word implies, because the "
            "paper’s annotators did not separate them; in part if its interval ends below a tenth of the published "
            "slope or contains 0.",
            semantic_rises,
        ),
        ex.Claim(
            "every-key",
            "Every key has at least one pattern",
            "160 of 160 keys",
            "Share of memories with a pattern of the kinds that the paper’s annotators used (recurring words and "
            "subjects), over all layers, Wilson interval. Appears if it lies above 95%, does not appear if it lies "
            "below.",
            every_key_has_one,
            write=percent,
        ),
        ex.Claim(
            "patterns-a-key",
            "A key has 3.6 patterns",
            "3.6 on average",
            "Patterns per memory, mean over layers. Shown without a verdict, because the number depends on the kinds "
            "of patterns that are looked for.",
            patterns_a_key,
            write=lambda size: f"{size:.2f}",
        ),
        ex.Claim(
            "covered",
            "At least 65% of triggers have a pattern",
            "65% to 80%",
            "Share of trigger prefixes with a pattern of the kinds that the paper’s annotators used (recurring words "
            "and subjects), mean over layers. Appears if the 95% interval lies above 65% (more than 80% is reported), "
            "does not appear if it lies below.",
            triggers_are_covered,
            write=percent,
        ),
    ),
    picture=ex.Picture(
        _DIVIDED,
        {"shallow": "shallow", "implied": "implied", "beyond": "beyond"},
        by_layer,
        remark=rate_of_chance,
        below=print_people,
    ),
)
