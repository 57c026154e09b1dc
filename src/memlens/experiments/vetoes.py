"""Vetoes (beyond the paper): memories that lower the residual's top token in a composition.

For every composition, the prefix pass lists the ten memories that lowered the logit of top(r) most, relative to the
mean of all logits. This table counts for each memory how often it is among the ten, by how much it lowers the logit on
average, and which token it vetoes most often. `token_times` distinguishes memories that veto many tokens from memories
that always veto the same one.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from memlens.experiments import experiment as ex
from memlens.index.reader import Index
from memlens.memory import MemoryNames
from memlens.text import curve, number, plain_table, quoted

if TYPE_CHECKING:
    from memlens.experiments.prefix_pass import PrefixTables

_DRAWN, _PRINTED = 14, 10
SCHEMA = ex.schema(
    "layer:int32 memory:int32",
    "times:int64 push",  # how often the memory is among the ten strongest vetoes, and its mean effect (negative)
    "token:int32 token_text:string token_times:int64",  # the token that the memory vetoes most often (lowest id)
    "compositions:int64",  # number of compositions in the layer
)


def compute(tables: "PrefixTables", seed: int) -> list[ex.Row]:
    """Return one row per memory with a veto, sorted by layer, frequency (highest first) and memory."""
    rows: list[ex.Row] = []
    for layer, columns in tables.by_layer():
        tokens: dict[int, Counter[int]] = defaultdict(Counter)
        pushes: dict[int, list[float]] = defaultdict(list)
        compositions = 0
        for token, memories, amounts in zip(
            columns["residual_token"], columns["vetoes"], columns["veto_pushes"], strict=True
        ):
            if memories is None:
                continue
            compositions += 1
            for memory, amount in zip(memories, amounts, strict=True):
                tokens[memory][int(token)] += 1
                pushes[memory].append(amount)
        for memory in sorted(tokens, key=lambda memory: (-len(pushes[memory]), memory)):
            token, times = min(tokens[memory].items(), key=lambda entry: (-entry[1], entry[0]))
            rows.append(
                {
                    "layer": layer,
                    "memory": memory,
                    "times": len(pushes[memory]),
                    "push": float(np.mean(pushes[memory])),
                    "token": token,
                    "token_text": tables.index.vocabulary[token],
                    "token_times": times,
                    "compositions": compositions,
                }
            )
    return rows


def _most_often(rows: Sequence[ex.Row], most: int, names: MemoryNames) -> list[ex.Row]:
    best = sorted(rows, key=lambda row: (-row["times"], row["layer"], row["memory"]))[:most]
    return [row | {"name": str(names.name(row["layer"], row["memory"]))} for row in best]


def draw(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    """Plot the memories that veto most often."""
    import altair as alt

    from memlens.experiments import charts

    shown = _most_often(rows, _DRAWN, model.names)
    chart = (
        alt.Chart(alt.Data(values=shown))
        .mark_bar()
        .encode(
            x=alt.X("times:Q", title="compositions vetoed by this memory"),
            y=alt.Y("name:N", title=None, sort=[row["name"] for row in shown]),
            tooltip=[
                "name:N",
                "times:Q",
                alt.Tooltip("push:Q", title="mean effect", format=".3f"),
                "token_text:N",
                "token_times:Q",
            ],
        )
    )
    return [charts.table_panel("vetoes", chart)]


def print_vetoes(index: Index, tables: ex.Rows, width: int, origin: str) -> tuple[str, list[Any]]:
    """Return a curve of compositions by layer and a table of the memories that veto most often."""
    from rich.text import Text

    rows = tables["vetoes"]
    compositions = {row["layer"]: row["compositions"] for row in rows}
    sample = f"{len(rows):,} memories in {sum(compositions.values()):,} compositions, from {origin}"
    counts = [float(compositions.get(layer, 0)) for layer in index.layers]
    line = Text.assemble("compositions  ", (curve(counts), "cyan"), (f"  maximum {max(counts):,.0f}", "dim"))
    table = plain_table(["memory", ">times", ">of", ">mean effect", "mostly vetoes", ">times"])
    for row in _most_often(rows, _PRINTED, index.names):
        table.add_row(
            Text(row["name"], "bold"),
            f"{row['times']:,}",
            f"{row['compositions']:,}",
            number(row["push"]),
            Text(quoted(row["token_text"], 20), "cyan"),
            f"{row['token_times']:,}",
        )
    return sample, [line, table]


EXPERIMENT = ex.prefix_experiment(
    "vetoes",
    "beyond the paper",
    "Memories that lower the residual's top token",
    ex.ResultTable(
        "vetoes",
        SCHEMA,
        compute,
        question="Which memories veto the residual’s token?",
        lead="Memories that lower the residual’s top token when a layer changes the prediction.",
        how="For each memory: how often it is among the ten memories with the most negative effect on the logit of the "
        "residual’s top token, the mean of this effect, and the token that it vetoes most often.",
        draw=draw,
    ),
    terminal=print_vetoes,
)
