"""Write a section of docs/findings.md: one prompt, layer by layer, and the memories that its prediction depends on.

    memlens demo && python docs/make_story.py memlens-demo "Scientists had believed" " that"

tests/docs/test_findings_page.py computes the numbers again.
"""

import sys
from pathlib import Path
from typing import Any

import memlens
from memlens.text import percent

PAGE = Path(__file__).with_name("findings.md")
BEGIN, END = "<!-- story -->\n", "<!-- end of story -->"
SILENCED = 6  # memories to silence


def quote(token: str) -> str:
    return f'"{token}"'


def top_token(shares: Any) -> str:
    return f'"{shares[0].text}" ({percent(shares[0].p)})'


def story(model: memlens.MemoryModel, index: memlens.Index, prompt: str, token: str) -> str:
    """Return the section as Markdown."""
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
    return f"""The prompt is **{prompt}**. The bundled model gives the token {quote(token)} a probability of
{trace.token.p:.3f} (the prediction is {quote(trace.prediction.text)}).

```
memlens trace memlens-demo "{prompt}" --token "{token}"
```

In each layer, the memories add y to the residual r, and the output is o = r + y. The table shows which token r, y and o
predict and the probability of {quote(token)} in o. The last column is the case of the paper's Figure 11: o keeps the
prediction of r (residual), o takes the prediction of y (ffn), r and y agree (agreement), or o predicts a third token
(composition).

| layer | r predicts | y predicts | o predicts | p of {quote(token)} | case |
| --- | --- | --- | --- | --- | --- |
{chr(10).join(rows)}

From layer {trace.settled} on, the prediction does not change. The logit of {quote(token)}, {trace.logit:.2f}, is an
exact sum: {parts}.

The next table lists the {SILENCED} memories with the largest effect on the logit. For each row, the model is run again
with only that memory silenced. The effect on the logit does not determine the change in p, because later layers react
when a memory is silenced.

| memory | effect on the logit | p of {quote(token)} without it | triggers |
| --- | --- | --- | --- |
{chr(10).join(silenced)}

With all {SILENCED} silenced, the probability of {quote(token)} falls from {trace.token.p:.3f} to
{together.after.token.p:.3f}, and the model predicts {quote(together.after.prediction.text)}.
"""


def main() -> None:
    folder, prompt, token = sys.argv[1:]
    index = memlens.open_index(folder)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    section = story(index.load_model(), index, prompt, token)
    PAGE.write_text(f"{before}{BEGIN}{section}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
