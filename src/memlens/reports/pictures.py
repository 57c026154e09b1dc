"""Pictures of the report: one memory, one prompt, roles by layer, and claims next to the paper's numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from memlens.experiments.experiment import JudgedClaim, Panel, Row, read_table
from memlens.experiments.prefixes import LAYERS, LAYERS_SCHEMA, PREFIXES, PREFIXES_SCHEMA
from memlens.experiments.silencing import word_tokens
from memlens.index.memory import read_value
from memlens.index.reader import Index
from memlens.reports.findings import Finding
from memlens.reports.galleries import TriggerExample, example_of
from memlens.text import number, percent, tail, token, visible

_TOKENS, _TRIGGERS = 10, 5  # number of top tokens and of triggers to show
_SHORTEST, _LONGEST = 20, 90  # length of the prompt in characters
_PROMPT_LAYERS = 48  # maximum number of layers in the picture of a prompt
_LOWEST, _HIGHEST = -1.0, 2.5  # range of the plot of claims, in multiples of the paper's number


@dataclass(frozen=True)
class MemoryPicture:
    """A memory: triggers on the left, top tokens of its value on the right."""

    finding: Finding
    examples: list[TriggerExample]
    panel: Panel | None  # top tokens and their probabilities relative to uniform; None without a values table


@dataclass(frozen=True)
class PromptPicture:
    """A prompt, and what the residual predicts in each layer."""

    text: str
    token: str
    layers: int  # number of layers in which the residual does not predict the final token
    panel: Panel


def picture_memory(index: Index, findings: Sequence[Finding]) -> MemoryPicture | None:
    """Return a picture of the memory of the first finding, or None if no finding is about a memory."""
    finding = next((finding for finding in findings if finding.memory), None)
    if finding is None:
        return None
    value, triggers = read_value(index, finding.memory), index.triggers(finding.memory, limit=_TRIGGERS)
    promoted = value.promotes[0].token if value and value.promotes else None
    panel = None
    if value is not None:
        tokens = [f"{place}. {token(one.text)}" for place, one in enumerate(value.promotes[:_TOKENS], 1)]
        uniform = 1 / index.manifest.value_tokens
        rows = [{"name": name, "p": one.number / uniform} for name, one in zip(tokens, value.promotes, strict=False)]
        text = f"Top tokens of {finding.memory}: {', '.join(tokens)}"
        panel = _bars("memory-tokens", rows, "probability relative to uniform", text)
    return MemoryPicture(finding, [example_of(index, trigger, promoted) for trigger in triggers], panel)


def picture_prompt(index: Index) -> PromptPicture | None:
    """Return a picture of one prefix of the prefix pass, or None if there is no pass or no suitable prefix.

    A prefix is suitable if its length is readable and the final token (the model's prediction) is the next token of the
    text. Among suitable prefixes, those whose final token starts a word are preferred, then those whose residuals
    predict at least three different tokens, then the largest gain in the final token's probability over the layers.
    """
    prefixes, layers = read_table(index, PREFIXES, PREFIXES_SCHEMA), read_table(index, LAYERS, LAYERS_SCHEMA)
    if prefixes is None or layers is None:
        return None
    rows = index.sql(
        f"""SELECT p.prefix, p.text, p.final_token,
                   max_by(l.p_final, l.layer) - min_by(l.p_final, l.layer) AS gain
            FROM {{{PREFIXES}}} p JOIN {{{LAYERS}}} l USING (prefix)
            WHERE p.target = p.final_token AND length(p.text) BETWEEN $1 AND $2
            GROUP BY p.prefix, p.text, p.final_token
            ORDER BY list_contains($3, p.final_token) DESC, count(DISTINCT l.residual_token) >= 3 DESC, gain DESC,
                     p.prefix LIMIT 1""",
        [_SHORTEST, _LONGEST, sorted(word_tokens(index))],
    )
    if not rows:
        return None
    (prompt,) = rows
    by_layer = index.sql(
        f"SELECT layer, residual_token, p_final FROM {{{LAYERS}}} WHERE prefix = $1 ORDER BY layer", [prompt["prefix"]]
    )
    step = -(-len(by_layer) // _PROMPT_LAYERS)  # draw every layer, or every second (third, ...) layer of a deep model
    drawn = [
        {"name": f"{row['layer']}  {token(index.vocabulary[row['residual_token']])}", "p": row["p_final"]}
        for row in by_layer[::-1][::step][::-1]
    ]
    final = token(index.vocabulary[prompt["final_token"]])
    text = f"Prediction of the residual and probability of {final} before each layer"
    panel = _bars("prompt-layers", drawn, f"probability of {final} before the layer", text)
    others = sum(row["residual_token"] != prompt["final_token"] for row in by_layer)
    return PromptPicture(tail(prompt["text"], _LONGEST), final, others, panel)


def _bars(name: str, rows: list[Row], title: str, text: str) -> Panel:
    """Draw one horizontal bar per row, in the order of the rows."""
    import altair as alt

    from memlens.experiments import charts

    x = alt.X("p:Q", title=title, axis=alt.Axis(format=".2~g", tickCount=5), scale=alt.Scale(zero=True))
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar()
        .encode(
            x=x,
            y=alt.Y("name:N", title=None, sort=[row["name"] for row in rows]),
            tooltip=["name:N", alt.Tooltip("p:Q", format=".3g")],
        )
    )
    return charts.panel(name, chart, visible(text))


def picture_roles(by_layer: Sequence[dict[str, int]], roles: Sequence[str]) -> list[Panel]:
    """Draw the share of memories with each role by layer, as squares of different opacity."""
    import altair as alt

    from memlens.experiments import charts
    from memlens.experiments.style import colour

    rows: list[Row] = [
        {"layer": row["layer"], "role": role, "share": row[role] / row["memories"], "memories": row[role]}
        for row in by_layer
        for role in roles
        if row["memories"]
    ]
    most = max((row["share"] for row in rows), default=0)
    if not most:
        return []
    chart = (
        alt.Chart(alt.Data(values=rows), title=f"share of a layer’s memories, darkest {percent(most)}")
        .mark_rect(fill=colour("yours"))
        .encode(
            x=alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0, labelOverlap="greedy")),
            y=alt.Y("role:N", title=None, sort=list(roles)),
            fillOpacity=alt.FillOpacity(
                "share:Q", scale=alt.Scale(type="sqrt", domain=[0, most], range=[0, 1]), legend=None
            ),
            tooltip=["role:N", "layer:O", alt.Tooltip("share:Q", format=".1%"), "memories:Q"],
        )
    )
    return [charts.panel("roles", chart, "Share of memories with each role, by layer")]


@dataclass(frozen=True)
class ClaimMark:
    """The number of a claim in this model and in shuffled networks, in multiples of the paper's number.

    All positions are percentages of the width of the plot. Numbers outside the plot are moved to its edge.
    """

    low: float
    value: float
    high: float
    shuffled: float | None
    text: str  # description for readers who do not see the plot

    @staticmethod
    def place(multiple: float) -> float:
        """Return the position of a multiple of the paper's number."""
        return round(100 * (min(max(multiple, _LOWEST), _HIGHEST) - _LOWEST) / (_HIGHEST - _LOWEST), 2)


def mark_claim(judged: JudgedClaim) -> ClaimMark | None:
    """Return the mark of a claim, or None if it was not measured or the paper has no number of the same kind."""
    judgement, published = judged.judgement, judged.published
    if judgement is None or judgement.measure is None or not published:
        return None
    ours = judgement.measure.times(1 / published)
    shuffled = None if judgement.shuffled_value is None else ClaimMark.place(judgement.shuffled_value / published)
    text = f"{number(ours.value)} times the paper’s number, {number(ours.low)} to {number(ours.high)}"
    low, value, high = (ClaimMark.place(edge) for edge in (ours.low, ours.value, ours.high))
    return ClaimMark(low, value, high, shuffled, text)


def describe_text(index: Index) -> str:
    """Return one sentence on whether the text is long enough: how many memories are active on enough prefixes."""
    prefixes, top = index.manifest.counts.prefixes, index.manifest.settings.top
    (row,) = index.sql(
        "SELECT count(*) AS memories, count(*) FILTER (frequency * $1 >= $2) AS enough FROM {memories}",
        [prefixes, 10 * top],
    )
    share = percent(row["enough"] / row["memories"]) if row["memories"] else "none"
    return (
        f"The text has {prefixes:,} prefixes, and {share} of the memories are active on at least {10 * top:,} of them, "
        "ten times the length of a trigger list. For the other memories, more text would change the lists most."
    )
