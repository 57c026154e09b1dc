"""Last layer (Section 5.2): 100 random prefixes for which the last layer is a composition, to be judged by people.

A row has the prefix, the top token before and after the last layer, and the memories with the largest effect on this
change (columns `memories` and `pushes`). The effect of memory i is m_i times (score of the new token in its value -
score of the old token), at the scale of the final norm for the layer's output. `cosine` compares the output embeddings
of the two tokens, as a hint for people. The tokens count as related if the cosine exceeds `bar`, the 95% quantile of
the cosines of unrelated tokens (the old token of one change and the new token of another). The table also counts
people's verdicts.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from memlens.annotations.records import CHOICES, VERDICTS, Annotations, LastLayerChange
from memlens.errors import IndexFolderError
from memlens.experiments import experiment as ex
from memlens.index.reader import Index
from memlens.stats import Estimate, draw as draw_sample, generator, wilson
from memlens.text import curve, cut_left, plain_table, quoted, visible

if TYPE_CHECKING:
    from memlens.experiments.prefix_pass import PrefixTables

EXAMPLES = 100
_RELATED = 0.95  # quantile of the cosines of unrelated tokens
_SHOWN = 5  # number of examples in the terminal
_TEXT_TAKEN, _VERDICTS_TAKEN = 55, 24  # terminal width taken by the columns other than the text, and by verdicts
SCHEMA = ex.schema(
    "layer:int32 prefix:int32 sentence:int64 position:int32 text:string",  # prefix: row of experiments/prefixes
    "residual:int32 residual_text:string output:int32 output_text:string",  # top tokens before and after the layer
    "cosine:float32 memories:[int32] pushes:[float32]",  # memories sorted by effect, and their effects
    "bar:float32",  # tokens with a larger cosine count as related; equal in all rows
    "compositions:int64",  # number of compositions in the whole sample
    "example:string related:int64 distant:int64",  # name of the example; number of people who gave each verdict
)


def compute(tables: "PrefixTables", seed: int) -> list[ex.Row]:
    """Return at most 100 rows in the order of the prefixes, with the number of people for each verdict."""
    layers = dict(tables.by_layer())
    if tables.last_layer not in layers:
        raise IndexFolderError(
            f"the model's last layer, {tables.last_layer}, is not in this index; scan again with it in --layers"
        )
    columns = layers[tables.last_layer]
    compositions = np.array([row for row, memories in enumerate(columns["pushers"]) if memories is not None], np.int64)
    shuffled = [cosine for cosine in columns["cosine_shuffled"] if cosine is not None]
    bar = float(np.quantile(shuffled, _RELATED)) if shuffled else None
    places = tables.prefixes.select(["prefix", "sentence", "position", "text"]).to_pylist()
    verdicts = _verdicts(tables.index)
    rows = []
    for row in draw_sample(compositions, EXAMPLES, generator(seed, "last-layer")).tolist():
        before, after = int(columns["residual_token"][row]), int(columns["output_token"][row])
        change = {
            "layer": tables.last_layer,
            **places[row],
            "residual": before,
            "residual_text": tables.index.vocabulary[before],
            "output": after,
            "output_text": tables.index.vocabulary[after],
        }
        name = LastLayerChange.of(change).name
        numbers = {
            "cosine": columns["cosine"][row],
            "memories": columns["pushers"][row],
            "pushes": columns["pushes"][row],
            "bar": bar,
            "compositions": len(compositions),
        }
        rows.append(change | numbers | {"example": name} | {choice: verdicts[name, choice] for choice in CHOICES})
    return rows


def _verdicts(index: Index) -> Counter[tuple[str, str]]:
    """Return the number of people by example and verdict."""
    return Counter((verdict.subject, verdict.verdict) for verdict in Annotations(index).verdicts())


@dataclass(frozen=True)
class VerdictSummary:
    """The number of examples by majority verdict, and the mean cosine of the examples with each verdict."""

    examples: int
    related: int
    distant: int
    split: int  # number of examples with equally many people for both verdicts
    cosine_related: float | None
    cosine_distant: float | None

    def __str__(self) -> str:
        judged = self.related + self.distant + self.split
        counts = f"people judged {judged} of {self.examples}: {self.distant} distant, {self.related} related"
        counts += f", {self.split} undecided" if self.split else ""
        groups = ((self.cosine_distant, "distant"), (self.cosine_related, "related"))
        means = [f"{cosine:.2f} for {name} words" for cosine, name in groups if cosine is not None]
        return counts + (f"; mean cosine {', '.join(means)}" if means else "")


def summarize_verdicts(rows: Sequence[Mapping[str, Any]]) -> VerdictSummary | None:
    """Summarize the verdicts, or return None if there are none."""
    judged = [(row, row["related"] - row["distant"]) for row in rows if row.get("related") or row.get("distant")]
    if not judged:
        return None
    related = [row["cosine"] for row, lead in judged if lead > 0]
    distant = [row["cosine"] for row, lead in judged if lead < 0]
    means = (sum(group) / len(group) if group else None for group in (related, distant))
    return VerdictSummary(len(rows), len(related), len(distant), len(judged) - len(related) - len(distant), *means)


def draw(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    """Plot a histogram of the cosines between the top tokens before and after the last layer."""
    import altair as alt

    from memlens.experiments import charts

    table = pa.Table.from_pylist([{"cosine": row["cosine"]} for row in rows])
    x = alt.X("cosine:Q", bin=alt.Bin(maxbins=20), title="cosine of the two output embeddings")
    chart = alt.Chart(table).mark_bar().encode(x=x, y=alt.Y("count()", title="prefixes"))
    return [charts.table_panel("last-layer", chart)]


def verdict_note(index: Index, rows: list[ex.Row]) -> tuple[str, str] | None:
    summary = summarize_verdicts(rows)
    return ("verdicts", f"Here {summary}.") if summary else None


def print_changes(index: Index, tables: ex.Rows, width: int, origin: str) -> tuple[str, list[Any]]:
    """Return a line about the sample, and for the terminal the cosines, people's verdicts and the first few changes."""
    from rich.text import Text

    rows = tables["last-layer"]
    compositions = rows[0]["compositions"] if rows else 0
    sample = f"{len(rows):,} of {compositions:,} compositions of the last layer, from {origin}"
    if not rows:
        return sample, []
    edges = [-1 + step / 5 for step in range(11)]
    bins = [float(sum(low <= min(row["cosine"], 0.999) < high for row in rows)) for low, high in pairwise(edges)]
    output: list[Any] = [Text.assemble("cosine of the two words  -1 ", (curve(bins), "cyan"), " 1")]
    summary = summarize_verdicts(rows)
    if summary:
        output.append(Text(str(summary), "dim"))
    room = max(min(width, 160) - _TEXT_TAKEN - (_VERDICTS_TAKEN if summary else 0), 16)
    table = plain_table(
        [">prefix", "before", "after", ">cosine", *(["verdicts"] if summary else []), "largest effects"]
    )
    for row in rows[:_SHOWN]:
        counts = ", ".join(f"{row[choice]} {choice}" for choice in CHOICES if row[choice])
        table.add_row(
            cut_left(visible(row["text"] or "–"), room),
            quoted(row["residual_text"], 12),
            Text(quoted(row["output_text"], 12), "cyan"),
            f"{row['cosine']:.2f}",
            *([counts or "–"] if summary else []),
            Text(" ".join(str(index.names.name(row["layer"], memory)) for memory in row["memories"][:2]), "bold"),
        )
    return sample, [*output, table]


def changes_are_distant(evidence: ex.Evidence) -> ex.Judgement:
    rows = evidence.rows
    summary = summarize_verdicts(rows)
    judged = summary.related + summary.distant if summary else 0
    hinted = [row for row in rows if row.get("bar") is not None]
    hint = f"{sum(row['cosine'] <= row['bar'] for row in hinted)} of {len(hinted)}"
    if summary is None or not judged:
        return ex.NOT_MEASURED if not hinted else ex.Judgement(
            f"{hint} distant by the cosine hint; not judged by people",
            "",
            ex.UNCLEAR,
            "The cosine hint alone is not reliable: it classifies 95% of unrelated words as distant, but also many "
            "words that people judge as related.",
        )  # fmt: skip
    share = Estimate(summary.distant / judged, *wilson(summary.distant, judged))
    yours = f"{summary.distant} of {judged} distant according to people, {hint} by the cosine hint"
    return ex.judge_share(share, 0.5, "one half", ex.paper_statement("distant"), yours)


EXPERIMENT = ex.prefix_experiment(
    "last-layer",
    "Section 5.2",
    "Compositions of the last layer, for people to judge",
    ex.ResultTable(
        "last-layer",
        SCHEMA,
        compute,
        question="What does the last layer change?",
        lead="Random prefixes for which the last layer’s output is neither the residual’s nor the layer’s token. In "
        "the paper, people judged 66 of 100 changes as leading to a distant word, 34 to a related one.",
        how="A random sample of last-layer compositions: the top tokens of the residual before and after the last "
        "feed-forward block, the cosine of their output embeddings as a hint, the memories that contributed most, and "
        "the numbers of people who judged the two words as related or distant (memlens annotate INDEX verdicts).",
        draw=draw,
        note=verdict_note,
    ),
    last_layer=True,
    people=VERDICTS,
    claims=(
        ex.Claim(
            "last-layer",
            "Changes of the last layer lead to distant words more often than to related ones",
            "66 distant, 34 related, by people",
            "Share of changes that a majority of people judged as leading to a distant word. The claim appears if the "
            "Wilson interval lies above one half, and does not appear if it lies below. The cosine hint alone (words "
            "are related if their cosine exceeds 95% of those of unrelated words) is not sufficient.",
            changes_are_distant,
            published_measure=ex.paper_statement("distant"),
            is_compared=False,  # people do not judge shuffled networks
        ),
    ),
    terminal=print_changes,
)
