"""Patterns (Figure 2): the kinds of pattern of the trigger prefixes of a layer.

A prefix is shallow, semantic, both or not covered, depending on the patterns listed for it. Automatic patterns are
counted for all memories (or a sample), people's patterns for the memories they labeled, separately for each person who
has finished. Intervals are over memories, because the prefixes of one memory are not independent; if all memories are
equal, Wilson intervals with memories as observations. `lead` is the share of shallow prefixes minus that of semantic
ones.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.annotations.records import LABELS, Annotations
from memlens.experiments import experiment as ex
from memlens.index.reader import Index
from memlens.pattern.table import describe_chance
from memlens.progress import Progress, no_progress
from memlens.stats import Estimate, draw as draw_sample, generator, ratio_estimate, share_interval, wilson
from memlens.text import cut_right, percent, plain_table, visible

KINDS = ("shallow", "semantic", "both", "not_covered")
HUES = {"shallow": "c1", "both": "c3", "semantic": "c2", "not_covered": "c5"}
_PAPER_KINDS = {"shallow": "shallow", "shallow+semantic": "both", "semantic": "semantic", "not-covered": "not_covered"}
_NAME = 15  # columns for an annotator's name
_TOP = 25
_EVERY = 0.95

_COLUMNS = (
    "layer:int32 memories:int64 patterned_memories:int64",  # patterned: with at least one pattern
    "patterns:int64 prefixes:int64",
    *(f"{kind}:int64" for kind in KINDS),
    *(f"{kind}_{edge}" for kind in KINDS for edge in ("low", "high")),
    "lead lead_low lead_high each each_low each_high",  # shallow minus semantic share; patterns per memory
)
SCHEMA = ex.schema(
    *_COLUMNS,
    "senses auroc auroc_same_token",  # means over memories with a pattern; over patterns
    *ex.kind_columns("memories:int64", "patterned_memories:int64", "patterned", "low", "high"),  # in a mixture
)
PEOPLE_SCHEMA = ex.schema("annotator:string", *_COLUMNS)

Listed = tuple[str, Iterable[int]]  # kind and trigger ranks of a pattern


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
        for row in index.stream("SELECT * FROM {patterns} WHERE layer = $1", [layer]):
            if row["memory"] in listed:
                listed[row["memory"]].append((row["kind"], row["prefixes"]))
                found.append(row)
        summary = _summary([(filled[m], patterns) for m, patterns in listed.items()], random)
        rows.append({"layer": layer, **summary, **_scores(found)})
        for kind, span in ex.kind_spans(index.names, layer).items():
            rows[-1] |= ex.of_kind(
                kind, _patterned([patterns for memory, patterns in listed.items() if memory in span])
            )
    return rows


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
                    (filled.get(label.memory.memory, 0), [(p.kind, p.prefixes) for p in label.patterns])
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
    lead = ratio_estimate(counts[:, 0] - counts[:, 1], counts.sum(1), random, bounds=(-1.0, 1.0))
    listed = np.array([len(listed) for _, listed in memories])
    each = ratio_estimate(listed, np.ones(len(memories)), random, bounds=None)
    return row | ex.estimate_columns("lead", lead) | ex.estimate_columns("each", each)


def _kinds(filled: int, listed: list[Listed]) -> list[int]:
    """Count a memory's prefixes of each kind, in the order of KINDS."""
    shallow, semantic = (
        {rank for kind, ranks in listed if kind == which for rank in ranks} for which in ("shallow", "semantic")
    )
    covered = [len(shallow - semantic), len(semantic - shallow), len(shallow & semantic)]
    return [*covered, filled - sum(covered)]


def _intervals(counts: NDArray[np.int64], random: np.random.Generator) -> tuple[list[Any], list[Any]]:
    """Return 95% intervals of the shares; counts [memories, kinds]."""
    shares = [ratio_estimate(column, counts.sum(1), random) for column in counts.T]
    return [share and max(share.low, 0.0) for share in shares], [share and min(share.high, 1.0) for share in shares]


def published() -> list[ex.Row]:
    shares = ex.paper_figures()["fig2_pct"]
    return [
        {"layer": layer}
        | {ours: shares[theirs][layer] / 100 for theirs, ours in _PAPER_KINDS.items()}
        | {"lead": (shares["shallow"][layer] - shares["semantic"][layer]) / 100}
        for layer in range(ex.PAPER_LAYERS)
    ]


def draw(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    from memlens.experiments.charts import PAPER, YOURS

    return [
        _panel("patterns", rows, YOURS, model.layers),
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
    return [ex.part_shares(row, KINDS) for row in rows]


_CELLS = (
    *(ex.Column(kind, kind, interval=(f"{kind}_low", f"{kind}_high")) for kind in ("shallow", "semantic")),
    ex.Column("both", "both"),
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
    return f"false discovery rate {noted.rate:.2g}; semantic: beyond the last token" if noted else ""


def shallow_below_semantic_above(evidence: ex.Evidence) -> ex.Judgement:
    yours, theirs = (lead.trend("lead", "lead_low", "lead_high") for lead in (evidence, evidence.theirs))
    above = [lead for row in evidence.third("upper") if (lead := ex.estimate_of(row, "lead", "lead_low", "lead_high"))]
    if not above:
        return ex.NOT_MEASURED
    top = ex.mean_of(above)
    more = "more" if top.high < 0 else "not more" if top.low > 0 else "perhaps more"
    words = f"in the upper third {more} prefixes are semantic than shallow ({ex.as_points(-top.value)})"
    first = f"shallow minus semantic {ex.as_points(evidence.first('lead') or 0)}"
    return ex.judge_trend(yours, theirs, -1, first, (top.high < 0, words))


def every_key_has_one(evidence: ex.Evidence) -> ex.Judgement:
    patterned, memories = ex.pooled(evidence.rows, "patterned_memories", "memories")
    if not memories:
        return ex.NOT_MEASURED
    share = Estimate(patterned / memories, *wilson(patterned, memories))
    return ex.judge_share(share, _EVERY, "the threshold for “every”", 1.0, f"{patterned:,} of {memories:,}")


def patterns_a_key(evidence: ex.Evidence) -> ex.Judgement:
    known = [estimate for row in evidence.rows if (estimate := ex.prefix_estimate([row], "each"))]
    mean = ex.mean_of(known) if known else None
    return ex.judge_size(mean, ex.paper_statement("patterns_a_key"), lambda size: f"{size:.2f}", "per key")


def triggers_are_covered(evidence: ex.Evidence) -> ex.Judgement:
    shares = [ex.part_shares(row, KINDS) for row in evidence.rows]
    bare = [ex.estimate_of(row, "not_covered", "not_covered_low", "not_covered_high") for row in shares]
    covered = [Estimate(1 - estimate.value, 1 - estimate.high, 1 - estimate.low) for estimate in bare if estimate]
    if not covered:
        return ex.NOT_MEASURED
    mean, least, most = ex.mean_of(covered), *(ex.paper_statement(f"covered_{end}") for end in ("least", "most"))
    judged = ex.judge_share(mean, least, "the lowest published share", None, f"{percent(mean.value)} of triggers")
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
            lead="In the paper, keys of lower layers detect wordings and keys of upper layers detect subjects.",
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
            contract=("layer", "prefixes", "patterned_memories", *KINDS),
            note=false_discoveries,
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
            "patterns",
            "Upper layers hold fewer shallow and more semantic patterns than lower ones",
            "shallow in layers 0–8, semantic in 9–15",
            "Share of shallow minus share of semantic prefixes, by layer. " + ex.RULE_OF_TRENDS + " Also in part if "
            "semantic prefixes do not outnumber shallow ones in the upper third (the crossover).",
            shallow_below_semantic_above,
        ),
        ex.Claim(
            "every-key",
            "Every key has at least one pattern",
            "160 of 160 keys",
            "Share of memories with a pattern, over all layers, Wilson interval. Appears if it lies above 95%, does "
            "not appear if it lies below.",
            every_key_has_one,
        ),
        ex.Claim(
            "patterns-a-key",
            "A key has 3.6 patterns",
            "3.6 on average",
            "Patterns per memory, mean over layers. " + ex.RULE_OF_SIZES,
            patterns_a_key,
        ),
        ex.Claim(
            "covered",
            "65% to 80% of triggers have a pattern",
            "65% to 80%",
            "Share of trigger prefixes with a pattern, mean over layers. Appears if the 95% interval lies above 65% "
            "(more than 80% is reported), does not appear if it lies below.",
            triggers_are_covered,
        ),
    ),
    picture=ex.Picture(
        _CELLS,
        {"shallow": "shallow", "semantic": "semantic"},
        by_layer,
        remark=rate_of_chance,
        below=print_people,
    ),
)
