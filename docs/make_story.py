"""Write docs/story.md: one prompt in the bundled model, layer by layer, and the memories that it depends on.

    memlens demo && python docs/make_story.py memlens-demo "Two months" " later"

tests/docs/test_findings_page.py computes the numbers again.
"""

import sys
from pathlib import Path
from typing import Any

import memlens
from memlens.text import percent
from memlens.tracer.result import LayerTrace, Trace

PAGE = Path(__file__).with_name("story.md")
SILENCED = 6  # memories to silence


def quote(token: str) -> str:
    return f'"{token}"'


def top_token(shares: Any) -> str:
    return f'"{shares[0].text}" ({percent(shares[0].p)})'


def describe_layer(layer: LayerTrace, trace: Trace) -> str:
    """Return a paragraph about one layer."""
    token = quote(trace.token.text)
    lines = [
        f"**Layer {layer.layer}.** The residual predicts {top_token(layer.residual)} and the output "
        f"{top_token(layer.output)}. Attention adds {layer.attention:+.2f} to the logit of {token}, and the memories "
        f"add {layer.memories:+.2f}. The largest effects:\n"
    ]
    for memory in layer.by_effect[:2]:
        pattern = f"; triggers: {'; '.join(memory.patterns[:2])}" if memory.patterns else ""
        promoted = ", ".join(quote(token.text) for token in memory.promotes[:4])
        lines.append(f"- {memory.memory} ({memory.effect:+.2f}) promotes {promoted}{pattern}")
    return "\n".join(lines)


def story_page(model: memlens.MemoryModel, index: memlens.Index, prompt: str, token: str) -> str:
    trace = memlens.trace(model, prompt, token=token, index=index, top=10)
    strongest = [memory.memory for memory in trace.memories[:SILENCED]]
    alone = memlens.silence_each(model, prompt, strongest, token=token)
    together = memlens.intervene(model, prompt, [f"{memory}=0" for memory in strongest], token=token)
    rows = [
        f"| {layer.layer} | {' | '.join(map(top_token, (layer.residual, layer.ffn, layer.output)))} "
        f"| {layer.p:.4f} | {layer.case} |"
        for layer in trace.layers
    ]
    silenced = [
        f"| {memory.memory} | {memory.effect:+.2f} | {alone.p - alone.effects[memory.memory]:.3f} "
        f"| {'; '.join(memory.patterns[:2])} |"
        for memory in trace.memories[:SILENCED]
    ]
    parts = ", ".join(f"{name} {value:+.2f}" for name, value in trace.parts.items())
    return f"""# One prompt from the first layer to the last

The prompt is **{prompt}**. This page follows the token {quote(token)} through the bundled model, which gives it a
probability of {trace.token.p:.3f} (the prediction is {quote(trace.prediction.text)}). [Three memories](findings.md)
describes the first memory of the last table in more detail.

```
memlens trace memlens-demo "{prompt}" --token "{token}"
```

`memlens demo` makes the index `memlens-demo`, and `python docs/make_story.py memlens-demo "{prompt}" "{token}"` writes
this page.

## Predictions

In each layer, the memories add y to the residual r, and the output is o = r + y. The table shows which token r, y and o
predict and the probability of {quote(token)} in o. The last column is the case of the paper's Figure 11: o keeps the
prediction of r (residual), o takes the prediction of y (ffn), r and y agree (agreement), or o predicts a third token
(composition).

| layer | r predicts | y predicts | o predicts | p of {quote(token)} | case |
| --- | --- | --- | --- | --- | --- |
{chr(10).join(rows)}

From layer {trace.settled} on, the prediction does not change. The logit of {quote(token)}, {trace.logit:.2f}, is an
exact sum: {parts}.

## Layers

{(chr(10) * 2).join(describe_layer(layer, trace) for layer in trace.layers)}

## Memories that the prediction depends on

The table lists the {SILENCED} memories with the largest effect on the logit. For each row, the model is run again with
only that memory silenced. The effect on the logit does not determine the change in p, because later layers react when a
memory is silenced.

| memory | effect on the logit | p of {quote(token)} without it | triggers |
| --- | --- | --- | --- |
{chr(10).join(silenced)}

With all {SILENCED} silenced, the probability of {quote(token)} falls from {trace.token.p:.3f} to
{together.after.token.p:.3f}, and the model predicts {quote(together.after.prediction.text)}.
"""


def main() -> None:
    folder, prompt, token = sys.argv[1:]
    index = memlens.open_index(folder)
    PAGE.write_text(story_page(index.load_model(), index, prompt, token), encoding="utf-8")


if __name__ == "__main__":
    main()
