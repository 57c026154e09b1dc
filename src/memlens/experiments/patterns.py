"""Patterns (Figure 2): the kinds of pattern of the trigger prefixes of a layer.

A trigger prefix is shallow, semantic, both or not covered, depending on the patterns that it has. Automatic patterns
are counted for all memories or for a sample. People's patterns are counted for the memories that they labeled,
separately for each person who has finished labeling. Intervals are over memories, because the prefixes of one memory
are not independent. If all memories have the same share, the interval is Wilson's, with memories as observations.

The semantic prefixes of automatic patterns consist of two parts. Subjects `beyond` the last word come from topics,
which are tested against prefixes with the same last tokens. Subjects `implied` by the last word come from a class or
list of words that names a subject, such as months. Classes of function words count as wording. `paper_kinds` counts
only the kinds of patterns that the paper's annotators used: recurring words and subjects, but not forms of words,
positions in the sentence or lists of function words.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from memlens.annotations.records import LABELS, Annotations
from memlens.experiments import experiment as ex
from memlens.experiments.prefixes import STOP_LISTS
from memlens.index.reader import Index
from memlens.pattern.table import describe_chance
from memlens.pattern.words import NEXT
from memlens.progress import Progress, no_progress
from memlens.stats import Estimate, draw as draw_sample, generator, ratio_estimate, wilson
from memlens.text import cut_right, percent, plain_table, visible

KINDS = ("shallow", "semantic", "both", "not_covered")
SHALLOW, IMPLIED, BEYOND = "shallow", "implied", "beyond"  # bands: each pattern belongs to one band
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
)  # fmt: skip # names of word lists that name no subject
READERS = (
    "People see subjects in almost any text. A reader who did not know which triggers were real named 75 to 80 "
    "subjects for real triggers, and 66 for triggers that had been swapped for prefixes with the same last tokens."
)
_PAPER_KINDS = {"shallow": "shallow", "shallow+semantic": "both", "semantic": "semantic", "not-covered": "not_covered"}
_NAME = 15  # width of an annotator's name in the terminal
_TOP = 25
_EVERY = 0.95

_COLUMNS = (
    "layer:int32 memories:int64 patterned_memories:int64",  # patterned_memories: memories with at least one pattern
    "patterns:int64 prefixes:int64",
    *(f"{kind}:int64" for kind in KINDS),
    *(f"{kind}_{edge}" for kind in KINDS for edge in ("low", "high")),
    "each each_low each_high",  # number of patterns per memory
)
SCHEMA = ex.schema(
    *_COLUMNS,
    "implied:int64 beyond:int64",  # the two parts of the semantic prefixes
    *(f"{kind}_{edge}" for kind in (IMPLIED, BEYOND) for edge in ("low", "high")),
    "paper_kinds_memories:int64 paper_kinds:int64",  # memories and prefixes with a pattern of the paper's kinds
    "paper_kinds_low paper_kinds_high",  # interval of the share of these prefixes
    "senses auroc auroc_same_token",  # senses: mean over memories with a pattern; AUROCs: means over patterns
    *ex.kind_columns("memories:int64", "patterned_memories:int64", "patterned", "low", "high"),  # in a mixture
)
PEOPLE_SCHEMA = ex.schema("annotator:string", *_COLUMNS)


class Listed(NamedTuple):
    """A pattern of a memory."""

    band: str  # SHALLOW, IMPLIED or BEYOND
    ranks: Iterable[int]  # ranks of triggers with the pattern
    is_of_paper: bool = True  # whether the paper's annotators used this kind of pattern


def compute(
    index: Index, model: Any = None, *, seed: int = 0, sample: int | None = None, progress: Progress = no_progress
) -> list[ex.Row]:
    """Return one row per layer about the automatic patterns of `sample` memories or of all memories with triggers."""
    top = index.manifest.patterns.top if index.manifest.patterns else _TOP
    rows = []
    for layer in ex.layers_of(index, "patterns", progress):
        random = generator(seed, "patterns", layer)
        filled = _filled(index, layer, top)
        sampled = draw_sample(np.array(sorted(filled), np.int64), sample, random).tolist()
        listed: dict[int, list[Listed]] = {memory: [] for memory in sampled}
        pattern_rows = []
        for row in index.stream("SELECT * FROM {patterns} WHERE layer = $1 AND kind <> $2", [layer, NEXT]):
            if row["memory"] in listed:
                listed[row["memory"]].append(Listed(band_of(row), row["prefixes"], is_of_paper(row)))
                pattern_rows.append(row)
        memories = [(filled[memory], patterns) for memory, patterns in listed.items()]
        rows.append({"layer": layer, **_summarize(memories, random)})
        rows[-1] |= _divide(memories, random) | _average_scores(pattern_rows)
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
    # for example "ends with a month: may, june" or "ends with a word like barge, ferry"
    before, _, words = pattern["description"].rpartition(": ")
    if before:
        return SHALLOW if before.removeprefix("ends with ") in GRAMMAR else IMPLIED
    examples = [word.strip() for word in words.partition(" like ")[2].split(",")]
    contents = [word for word in examples if len(word) > 1 and word.isalpha() and word.lower() not in STOP_LISTS["en"]]
    return IMPLIED if 2 * len(contents) > len(examples) else SHALLOW


def is_of_paper(pattern: ex.Row) -> bool:
    """Return True if the pattern is of a kind that the paper's annotators used: a recurring word or a subject."""
    return band_of(pattern) != SHALLOW or pattern["pattern"].partition(":")[0] in WORDINGS


def _patterned(memories: Sequence[Sequence[Listed]]) -> ex.Row:
    """Return the number of memories that have a pattern, and their share with its interval, as columns."""
    count, patterned = len(memories), sum(bool(listed) for listed in memories)
    shares = ex.share_columns(patterned, count, ("patterned", "low", "high"))
    return {"memories": count, "patterned_memories": patterned} | shares


def _average_scores(patterns: Sequence[ex.Row]) -> ex.Row:
    """Return the number of senses per memory with patterns, and mean scores on held-out triggers, as columns."""
    senses = {(row["memory"], row.get("sense")) for row in patterns}
    memories = {memory for memory, _ in senses}
    means: ex.Row = {"senses": len(senses) / len(memories) if memories else None}
    for name in ("auroc", "auroc_same_token"):
        scores = [row[name] for row in patterns if row.get(name) is not None]
        means[name] = sum(scores) / len(scores) if scores else None
    return means


def compute_people(
    index: Index, model: Any = None, *, seed: int = 0, sample: int | None = None, progress: Progress = no_progress
) -> list[ex.Row]:
    """Return one row per layer and person about the patterns of each person who has finished labeling."""
    annotations = Annotations(index)
    labels = annotations.labels()
    top = annotations.sample.top if annotations.sample else _TOP
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
                rows.append({"annotator": person, "layer": layer, **_summarize(memories, random)})
    return rows


def _filled(index: Index, layer: int, top: int) -> dict[int, int]:
    """Return {memory: number of its triggers, at most `top`} for the memories of a layer that have triggers."""
    query = (
        """SELECT memory, count(*) AS n FROM {triggers} WHERE layer = $1 AND "end" = 'top' AND rank < $2 GROUP BY 1"""
    )
    return {row["memory"]: row["n"] for row in index.sql(query, [layer, top])}


def _summarize(memories: list[tuple[int, list[Listed]]], random: np.random.Generator) -> ex.Row:
    """Return the numbers of memories, patterns and prefixes by kind, as columns.

    `memories` are pairs of the number of a memory's triggers and its patterns.
    """
    row: ex.Row = {
        "memories": len(memories),
        "patterned_memories": sum(bool(listed) for _, listed in memories),
        "patterns": sum(len(listed) for _, listed in memories),
        "prefixes": sum(filled for filled, _ in memories),
    }
    row |= _count_prefixes(memories, KINDS, random)
    patterns = np.array([len(listed) for _, listed in memories])
    each = ratio_estimate(patterns, np.ones(len(memories)), random, bounds=None)
    return row | ex.estimate_columns("each", each)


def _divide(memories: list[tuple[int, list[Listed]]], random: np.random.Generator) -> ex.Row:
    """Return the numbers of IMPLIED and BEYOND prefixes, and of prefixes of the paper's kinds, as columns."""
    patterned = sum(any(pattern.is_of_paper for pattern in listed) for _, listed in memories)
    return {"paper_kinds_memories": patterned} | _count_prefixes(memories, (IMPLIED, BEYOND, "paper_kinds"), random)


def _count_prefixes(
    memories: list[tuple[int, list[Listed]]], names: Sequence[str], random: np.random.Generator
) -> ex.Row:
    """Return the number of prefixes counted under each of `names`, and the interval of their share, as columns."""
    counts = [_count_of_memory(filled, listed) for filled, listed in memories]
    wholes = np.array([filled for filled, _ in memories], np.int64)
    row: ex.Row = {}
    for name in names:
        column = np.array([of_memory[name] for of_memory in counts], np.int64)
        share = ratio_estimate(column, wholes, random)
        low, high = (None, None) if share is None else (max(share.low, 0.0), min(share.high, 1.0))
        row |= {name: int(column.sum()), f"{name}_low": low, f"{name}_high": high}
    return row


def _count_of_memory(filled: int, listed: list[Listed]) -> dict[str, int]:
    """Return {name: number of a memory's prefixes} for each kind, each semantic part, and the paper's kinds."""
    shallow, implied, beyond = (
        {rank for pattern in listed if pattern.band == band for rank in pattern.ranks}
        for band in (SHALLOW, IMPLIED, BEYOND)
    )
    semantic = implied | beyond
    return {
        "shallow": len(shallow - semantic),
        "semantic": len(semantic - shallow),
        "both": len(shallow & semantic),
        "not_covered": filled - len(shallow | semantic),
        IMPLIED: len(implied - beyond - shallow),
        BEYOND: len(beyond - shallow),
        "paper_kinds": len({rank for pattern in listed if pattern.is_of_paper for rank in pattern.ranks}),
    }


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
    """Draw one chart per person."""
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
    """Return the rows with shares instead of counts of prefixes."""
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
    """Return a table of the labels of people who have finished labeling."""
    from rich.text import Text

    people = by_layer(tables.get("patterns-people", ()))
    if not people:
        return []
    table = plain_table(["annotator", ">layer", ">memories", *(f">{column.head}" for column in _CELLS)])
    for row in people:
        cells = [str(row["layer"]), f"{row['memories']:,}", *(column.cell(row) for column in _CELLS)]
        table.add_row(Text(cut_right(visible(row["annotator"]), _NAME)), *cells)
    return ["labels by people who have finished labeling", table]


def false_discoveries(index: Index, rows: list[ex.Row]) -> tuple[str, str] | None:
    note = index.manifest.patterns
    return ("false discoveries", " ".join(describe_chance(note))) if note else None


def false_discovery_rate(index: Index) -> str:
    note = index.manifest.patterns
    legend = "implied, beyond: the subject is implied by the last word, or goes beyond it"
    return f"false discovery rate {note.rate:.2g}; {legend}" if note else ""


def _trends(evidence: ex.Evidence, kind: str) -> list[ex.Trend | None]:
    """Return the trends of the share of prefixes of a kind: in this model, and in the paper's model."""
    both = (replace(source, rows=by_layer(source.rows)) for source in (evidence, evidence.theirs))
    return [source.trend(kind, f"{kind}_low", f"{kind}_high") for source in both]


def shallow_falls(evidence: ex.Evidence) -> ex.Judgement:
    yours, theirs = _trends(evidence, SHALLOW)
    first = replace(evidence, rows=by_layer(evidence.rows)).first(SHALLOW)
    return ex.judge_trend(yours, theirs, -1, percent(first))


def semantic_rises(evidence: ex.Evidence) -> ex.Judgement:
    """Judge the direction on prefixes with a subject beyond the last word, and the size on all semantic prefixes.

    The paper's annotators did not separate these two groups.
    """
    rows = by_layer(evidence.rows)
    kind = BEYOND if rows and BEYOND in rows[0] else "semantic"  # the paper's rows have only the sum
    (beyond, _), (yours, theirs) = _trends(evidence, kind), _trends(evidence, "semantic")
    if yours is None or theirs is None:
        return ex.NOT_MEASURED
    judged = ex.judge_trend(beyond, theirs, 1, percent(replace(evidence, rows=rows).first(kind)))
    small = ex.direction(yours.slope, theirs.slope.value) != ex.APPEARS
    verdict = ex.PARTLY if judged.verdict == ex.APPEARS and small else judged.verdict
    upper = [row for row in ex.in_third(rows, "upper", evidence.layers) if row["semantic"] is not None]
    excess = sum(row["semantic"] - row["shallow"] for row in upper) / max(len(upper), 1)
    return replace(judged, verdict=verdict).and_also(
        f"{ex.as_points(yours.change.value)} including subjects that the last word implies; "
        f"semantic minus shallow in the upper third: {ex.as_points(excess)}"
    )


def every_key_has_one(evidence: ex.Evidence) -> ex.Judgement:
    rows = ex.known_rows(evidence.rows, (), "memories")
    if not rows or any(row.get("paper_kinds_memories") is None for row in rows):
        return ex.NOT_MEASURED
    patterned, memories = ex.pooled(rows, "paper_kinds_memories", "memories")
    share = Estimate(patterned / memories, *wilson(patterned, memories))
    judged = ex.judge_share(share, _EVERY, "the threshold for “every”", 1.0, f"{patterned:,} of {memories:,}")
    of_any_kind = percent(ex.pooled(rows, "patterned_memories", "memories")[0] / memories)
    return judged.and_also(f"{of_any_kind} have a pattern of any kind that memlens finds")


def patterns_a_key(evidence: ex.Evidence) -> ex.Judgement:
    estimates = [estimate for row in evidence.rows if (estimate := ex.prefix_estimate([row], "each"))]
    if not estimates:
        return ex.NOT_MEASURED
    mean = ex.mean_of(estimates)
    return ex.Judgement(
        f"{mean.value:.2f} per key",
        f"{mean.low:.2f} to {mean.high:.2f}",
        ex.NOT_JUDGED,
        "The number of patterns depends on which kinds are searched for and on how finely they are divided, so it is "
        "shown without a verdict.",
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
    by_third = " / ".join(percent(sum(row["paper_kinds"] for row in part) / len(part), 0) for part in thirds if part)
    of_any_kind = percent(1 - sum(row["not_covered"] for row in rows) / len(rows))
    judged = judged.and_also(f"by thirds of the layers: {by_third}; {of_any_kind} have a pattern of any kind")
    return (
        judged.and_also(f"the share exceeds the highest published one, {percent(most, 0)}")
        if mean.low > most
        else judged
    )


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
            "patterns automatically for every memory, so the procedures differ. A subject counts only if it goes "
            "beyond what the last tokens imply: triggers are compared with prefixes of other documents that have the "
            "same last tokens. The AUROC is a mean over patterns. It measures how well a pattern separates held-out "
            "triggers from random prefixes, and from prefixes with the same last tokens. Intervals are over "
            "memories, because the prefixes of one memory are not independent. The false discovery rate is "
            "controlled for the whole model (Benjamini and Hochberg).",
            draw=draw,
            published=published,
            note=false_discoveries,
            below=READERS,
        ),
        ex.ResultTable(
            "patterns-people",
            PEOPLE_SCHEMA,
            compute_people,
            question="What kind of pattern do people see?",
            lead="The same shares, from the labels of people who have finished labeling. One chart per person.",
            how="People describe patterns of sampled memories, each with at least three prefixes, as shallow or "
            "semantic, and mark the prefixes. They see the labels of other people only after they have finished. "
            "Intervals are over the memories that a person labeled.",
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
            "Share of prefixes that have only shallow patterns, by layer. " + ex.RULE_OF_TRENDS,
            shallow_falls,
            write=ex.as_points_per_layer,
            sign=-1,
            curve=SHALLOW,
        ),
        ex.Claim(
            "semantic",
            "Upper layers hold more semantic patterns than lower ones",
            "11% of prefixes in layers 0–4, 39% in layers 11–15",
            "Direction: share of prefixes whose subject goes beyond the last word. "
            + ex.RULE_OF_TRENDS
            + " Size: the slope of all semantic prefixes, including subjects that the last word implies, because the "
            "paper’s annotators did not separate them. The claim appears only in part if the interval of this slope "
            "ends below a tenth of the published slope or contains 0.",
            semantic_rises,
            write=ex.as_points_per_layer,
            curve=BEYOND,
        ),
        ex.Claim(
            "every-key",
            "Every key has at least one pattern",
            "160 of 160 keys",
            "Share of memories over all layers with a pattern of the kinds that the paper’s annotators used (recurring "
            "words and subjects). The claim appears if the Wilson interval lies above 95%, and does not appear if it "
            "lies below.",
            every_key_has_one,
            write=percent,
            published_measure=1.0,
        ),
        ex.Claim(
            "patterns-a-key",
            "A key has 3.6 patterns",
            "3.6 on average",
            "Patterns per memory, mean over layers. The number is shown without a verdict, because it depends on which "
            "kinds of patterns are searched for.",
            patterns_a_key,
            published_measure=3.6,
            write=lambda size: f"{size:.2f}",
        ),
        ex.Claim(
            "covered",
            "At least 65% of triggers have a pattern",
            "65% to 80%",
            "Share of trigger prefixes with a pattern of the kinds that the paper’s annotators used (recurring words "
            "and subjects), mean over layers. The claim appears if the 95% interval lies above 65%, and does not "
            "appear if it lies below. The reason says if the share exceeds 80%.",
            triggers_are_covered,
            write=percent,
            published_measure=ex.paper_statement("covered_least"),
        ),
    ),
    picture=ex.Picture(
        _DIVIDED,
        {"shallow": "shallow", "implied": "implied", "beyond": "beyond"},
        by_layer,
        remark=false_discovery_rate,
        below=print_people,
    ),
)
