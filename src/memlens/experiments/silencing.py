"""Silencing (beyond the paper): how much less likely a token becomes if a memory that promotes it is silenced.

1. Select memories whose value promotes a token that follows many of their triggers, largest share first.
2. For each memory, select up to three triggers that are followed by this token.
3. Run the model on each trigger with and without the memory, and read the probability of the token, p and p_without.
   The factor of the memory is the geometric mean of p / p_without over its triggers.
4. For the memories with the largest factors, continue the shortest of these triggers with and without the memory.

A memory is silenced at every position. Step 1 considers only tokens that start a word of the corpus and are not among
its most frequent tokens, unless no token qualifies.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING, Any

from memlens.experiments import experiment as ex
from memlens.experiments.prefixes import frequent_tokens
from memlens.index.reader import Index
from memlens.memory import MemoryId, Trigger
from memlens.progress import Progress, no_progress
from memlens.text import curve, cut_left, percent, plain_table, quoted, visible

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel

CANDIDATES = 60  # number of memories to silence
PROMPTS = 3  # maximum number of triggers per memory
PROMOTED = 10  # number of top tokens of a value to compare with next tokens
LIKELY = 0.1  # minimum mean probability of the token for a continuation and a finding
_LEAST = 5  # minimum number of triggers that are followed by the token
_LONGEST = 80  # maximum length of a prompt in characters
_CONTINUED, _TOKENS = 5, 4  # number of memories with continuations; tokens per continuation
_DRAWN, _PRINTED = 12, 10  # number of memories in the chart and in the terminal

SCHEMA = ex.schema(
    "layer:int32 memory:int32 token:int32 token_text:string",
    "follows:int64 followed:int64",  # number of triggers followed by the token, and of triggers followed by any token
    "rank:int32 prompt:string last_token:string",  # rank of the trigger, its text, and the text of its last token
    "p p_without",
    "p_mean factor",  # mean of p, and geometric mean of p / p_without; equal in all rows of a memory
    "continuation:string continuation_without:string",  # for the first prompt of some memories
)


def compute(
    index: Index,
    model: MemoryModel,
    *,
    seed: int = 0,
    sample: int | None = CANDIDATES,
    progress: Progress = no_progress,
) -> list[ex.Row]:
    """Return one row per memory and prompt, from `sample` candidates or all of them. Ignores `seed`.

    Memories are sorted by factor, largest first, and the prompts of a memory by length.
    """
    from memlens.tracer.attribution import silence_each
    from memlens.tracer.intervene import generate

    rows = select_candidates(index)[:sample]
    names = [index.names.name(row["layer"], row["memory"]) for row in rows]
    triggers = index.triggers_of(names)
    memories: list[tuple[MemoryId, list[ex.Row]]] = []
    for done, (name, candidate) in enumerate(zip(names, rows, strict=True)):
        progress("silencing", done, len(rows))
        prompts = {
            trigger.text: trigger for trigger in triggers[name] if _can_be_run(trigger, candidate["token"], model)
        }
        measured = []
        for trigger in sorted(islice(prompts.values(), PROMPTS), key=lambda trigger: len(trigger.text)):
            attribution = silence_each(model, trigger.text, [name], token=candidate["token"])
            p_without = attribution.p - attribution.effects[name]
            places = {"rank": trigger.rank, "prompt": trigger.text, "last_token": trigger.token}
            measured.append(candidate | places | {"p": attribution.p, "p_without": max(p_without, 0.0)})
        if measured:
            memories.append((name, [row | _summarize(measured) for row in measured]))
    memories.sort(key=lambda entry: (-entry[1][0]["factor"], entry[0]))
    likely = [entry for entry in memories if entry[1][0]["p_mean"] >= LIKELY]
    for name, (first, *_) in likely[:_CONTINUED]:
        for column, edits in (("continuation", None), ("continuation_without", f"{name}=0")):
            first[column] = generate(model, first["prompt"], _TOKENS, edits).text
    progress("silencing", len(rows), len(rows))
    return [row for _, measured in memories for row in measured]


def select_candidates(index: Index) -> list[ex.Row]:
    """Return one row per memory whose value promotes a token that follows many of the memory's triggers."""
    rows = index.sql(
        """WITH followed AS (
               SELECT layer, memory, t.next_token AS token, count(*) AS follows,
                      sum(count(*)) OVER (PARTITION BY layer, memory)::BIGINT AS followed
               FROM {triggers} t JOIN {values} v USING (layer, memory)
               WHERE t."end" = 'top' AND t.next_token IS NOT NULL GROUP BY layer, memory, t.next_token
           )
           SELECT layer, memory, token, follows, followed FROM followed JOIN {values} v USING (layer, memory)
           WHERE list_contains(v.tokens[1:$1], token) AND follows >= $2
           ORDER BY follows / followed DESC, layer, memory, token""",
        [PROMOTED, _LEAST],
    )
    words = word_tokens(index)
    best: dict[tuple[int, int], ex.Row] = {}
    for row in [row for row in rows if row["token"] in words] or rows:
        best.setdefault((row["layer"], row["memory"]), row | {"token_text": index.vocabulary[row["token"]]})
    return list(best.values())


def word_tokens(index: Index) -> set[int]:
    """Return the tokens that start a word of the corpus, without its most frequent tokens."""
    vocabulary = index.vocabulary
    marks_words = any(text[:1] == " " and text.strip() for text in vocabulary)  # whether a space marks a word's start
    rows = index.sql("SELECT DISTINCT unnest(tokens) AS token FROM {corpus}")
    tokens = {row["token"] for row in rows} - {*frequent_tokens(index)}
    return {
        token
        for token in tokens
        if (vocabulary[token][:1] == " " or not marks_words)
        and len(vocabulary[token].strip()) >= 3
        and vocabulary[token].strip().isalpha()
    }


def _can_be_run(trigger: Trigger, token: int, model: MemoryModel) -> bool:
    """Return True if the token follows the trigger, and the trigger's text can be run and continued as a prompt."""
    if trigger.next_token != token or len(trigger.text) > _LONGEST or trigger.text.startswith("-"):
        return False
    length = trigger.prefix.position + 1 + model.tokenizer.adds_bos
    if model.context is not None and length + _TOKENS > model.context:
        return False
    # if a trigger ends inside a word, its text may have other tokens than the trigger
    return len(model.tokenizer.encode([trigger.text])[0].ids) == trigger.prefix.position + 1


def _summarize(rows: list[ex.Row]) -> ex.Row:
    smallest = 1e-9  # smaller probabilities are raised to this one
    logs = [math.log(max(row["p"], smallest) / max(row["p_without"], smallest)) for row in rows]
    return {"p_mean": sum(row["p"] for row in rows) / len(rows), "factor": math.exp(sum(logs) / len(logs))}


def first_prompts(rows: list[ex.Row]) -> list[ex.Row]:
    """Return the first row of each memory."""
    first: dict[tuple[int, int], ex.Row] = {}
    for row in rows:
        first.setdefault((row["layer"], row["memory"]), row)
    return list(first.values())


def draw(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    """Plot p with and without each memory on its shortest prompt, as a bar from one to the other."""
    import altair as alt

    from memlens.experiments import charts

    shown = [
        row | {"name": f"{model.names.name(row['layer'], row['memory'])} {quoted(row['token_text'])}"}
        for row in first_prompts(rows)[:_DRAWN]
    ]
    axis = alt.Axis(format=".0%", tickCount=5)
    x = alt.X("p_without:Q", title="p of the token, without and with the memory", axis=axis)
    details = [alt.Tooltip(f"{name}:Q", format=".3f") for name in ("p", "p_without", "factor")]
    chart = (
        alt.Chart(alt.Data(values=shown))
        .mark_bar()
        .encode(
            x=x,
            x2="p:Q",
            y=alt.Y("name:N", title=None, sort=[row["name"] for row in shown]),
            tooltip=["name:N", "prompt:N", *details],
        )
    )
    return [charts.table_panel("silencing", chart)]


def print_silencing(index: Index, tables: ex.Rows, width: int, origin: str) -> tuple[str, list[Any]]:
    """Return a line about the sample, a curve of memories by layer, and a table of the memories with large factors."""
    from rich.text import Text

    rows = list(tables["silencing"])
    memories = first_prompts(rows)
    counts = [float(sum(row["layer"] == layer for row in memories)) for layer in index.layers]
    line = Text.assemble("memories by layer  ", (curve(counts), "cyan"), (f"  maximum {max(counts):,.0f}", "dim"))
    table = plain_table(["memory", "token", ">follows", ">p", ">without", ">factor", "prompt"])
    for row in memories[:_PRINTED]:
        table.add_row(
            Text(str(index.names.name(row["layer"], row["memory"])), "bold"),
            Text(quoted(row["token_text"], 14), "cyan"),
            percent(row["follows"] / row["followed"], 0),
            f"{row['p']:.3f}",
            f"{row['p_without']:.3f}",
            f"{row['factor']:.2f}",
            cut_left(visible(row["prompt"]), max(min(width, 120) - 64, 12)),
        )
    return f"{len(memories):,} memories, each on up to {PROMPTS} of its triggers ({len(rows):,} prompts)", [line, table]


EXPERIMENT = ex.Experiment(
    "silencing",
    "beyond the paper",
    "Tokens that become less likely when a memory is silenced",
    (
        ex.ResultTable(
            "silencing",
            SCHEMA,
            compute,
            question="How much do predictions depend on single memories?",
            lead="The probability of a token that follows a memory’s triggers, with and without the memory. The bar of "
            "a memory ends at the probability with it.",
            how="Candidates are the memories whose value promotes a token that follows many of their triggers. The "
            "model is run on up to three of these triggers with and without the memory, which is silenced at every "
            "position. The factor is the geometric mean of p / p_without over these triggers. The chart shows the "
            "shortest trigger of the memories with the largest factors, which were selected from all candidates.",
            draw=draw,
        ),
    ),
    sample_of="candidate memories",
    sample=CANDIDATES,
    needs=("values",),
    uses_model=True,
    terminal=print_silencing,
)
