"""Vetoes (beyond the paper): memories that push the residual's top token down where a composition happens.

At every composition the ten memories that took most from the logit of top(r), beside the mean of all logits, are noted;
here they are counted by memory: how often a memory was among the ten, how much it took on average, from which token
most often. Memories that veto many different tokens and those that always veto one are told apart by `token_times`.
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
    "times:int64 push",  # how often among the ten strongest vetoes; mean, below 0
    "token:int32 token_text:string token_times:int64",  # most vetoed; of equally often vetoed ones the lowest id
    "compositions:int64",  # of the layer, in the sample
)


def compute(seen: "PrefixTables", seed: int) -> list[ex.Row]:
    """One row per memory that vetoed at all; by layer, most often first, then by memory."""
    rows: list[ex.Row] = []
    for layer, columns in seen.by_layer():
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
                    "token_text": seen.vocabulary[token],
                    "token_times": times,
                    "compositions": compositions,
                }
            )
    return rows


def _most_often(rows: Sequence[ex.Row], most: int, names: MemoryNames) -> list[ex.Row]:
    chosen = sorted(rows, key=lambda row: (-row["times"], row["layer"], row["memory"]))[:most]
    return [row | {"name": str(names.name(row["layer"], row["memory"]))} for row in chosen]


def draw(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    """The memories that veto most often."""
    import altair as alt

    from memlens.experiments import charts

    shown = _most_often(rows, _DRAWN, model.names)
    chart = (
        alt.Chart(alt.Data(values=shown))
        .mark_bar()
        .encode(
            x=alt.X("times:Q", title="compositions with a veto of this memory"),
            y=alt.Y("name:N", title=None, sort=[row["name"] for row in shown]),
            tooltip=["name:N", "times:Q", alt.Tooltip("push:Q", format=".3f"), "token_text:N", "token_times:Q"],
        )
    )
    return [charts.table_panel("vetoes", chart)]


def print_vetoes(index: Index, tables: ex.Rows, width: int, origin: str) -> tuple[str, list[Any]]:
    """Compositions by layer, and the memories that veto most often."""
    from rich.text import Text

    rows = tables["vetoes"]
    compositions = {row["layer"]: row["compositions"] for row in rows}
    words = f"{len(rows):,} memories in {sum(compositions.values()):,} compositions, among {origin}"
    counts = [float(compositions.get(layer, 0)) for layer in index.layers]
    line = Text.assemble("compositions  ", (curve(counts), "cyan"), (f"  {max(counts):,.0f} at most", "dim"))
    table = plain_table(["memory", ">times", ">of", ">mean push", "mostly against", ">times"])
    for row in _most_often(rows, _PRINTED, index.names):
        table.add_row(
            Text(row["name"], "bold"),
            f"{row['times']:,}",
            f"{row['compositions']:,}",
            number(row["push"]),
            Text(quoted(row["token_text"], 20), "cyan"),
            f"{row['token_times']:,}",
        )
    return words, [line, table]


EXPERIMENT = ex.prefix_experiment(
    "vetoes",
    "beyond the paper",
    "Memories that push the residual's token down",
    ex.ResultTable(
        "vetoes",
        SCHEMA,
        compute,
        question="Which memories veto?",
        lead="Memories that push the residual’s favourite down when a layer changes the prediction.",
        how="Over all sampled compositions, the memories whose part in the logit of the residual’s top token is most "
        "negative: how often, how strongly, and against which token.",
        draw=draw,
    ),
    terminal=print_vetoes,
)
