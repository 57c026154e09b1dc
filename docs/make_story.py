"""Write docs/story.md: one prompt from the first layer of the bundled model to the last, and which memories it needed.

    memlens demo && python docs/make_story.py memlens-demo "Two months" " later"

Every number is of `memlens trace` and of silencing; tests/docs/test_findings_page.py runs them again.
"""

import sys
from pathlib import Path
from typing import Any

import memlens
from memlens.text import percent
from memlens.tracer.result import LayerTrace, Trace

PAGE = Path(__file__).with_name("story.md")
NEEDED = 6  # memories that are silenced


def shown(token: str) -> str:
    return f'"{token}"'


def says(shares: Any) -> str:
    return f'"{shares[0].text}" ({percent(shares[0].p)})'


def layer_words(layer: LayerTrace, seen: Trace) -> str:
    """One layer's work in a few sentences."""
    token = shown(seen.token.text)
    words = [
        f"**Layer {layer.layer}.** It begins with {says(layer.residual)} and ends with {says(layer.output)}. "
        f"Attention adds {layer.attention:+.2f} to the logit of {token}, all memories together {layer.memories:+.2f}."
    ]
    for one in layer.by_effect[:2]:
        verb = "for" if one.effect > 0 else "against"
        pattern = f", which fires on: {'; '.join(one.patterns[:2])}" if one.patterns else ""
        promoted = ", ".join(shown(token.text) for token in one.promotes[:4])
        words.append(f"Most {verb} it does {one.memory} ({one.effect:+.2f}){pattern}; it promotes {promoted}.")
    return " ".join(words)


def story_page(model: memlens.MemoryModel, index: memlens.Index, prompt: str, token: str) -> str:
    seen = memlens.trace(model, prompt, token=token, index=index, top=10)
    strongest = [one.memory for one in seen.memories[:NEEDED]]
    alone = memlens.silence_each(model, prompt, strongest, token=token)
    together = memlens.intervene(model, prompt, [f"{memory}=0" for memory in strongest], token=token)
    rows = [
        f"| {layer.layer} | {' | '.join(map(says, (layer.residual, layer.ffn, layer.output)))} "
        f"| {layer.p:.4f} | {layer.case} |"
        for layer in seen.layers
    ]
    silenced = [
        f"| {one.memory} | {one.effect:+.2f} | {alone.p - alone.effects[one.memory]:.3f} "
        f"| {'; '.join(one.patterns[:2])} |"
        for one in seen.memories[:NEEDED]
    ]
    parts = ", ".join(f"{name} {value:+.2f}" for name, value in seen.parts.items())
    return f"""# One prompt from first layer to last

The prompt is **{prompt}**, and the token to follow through the model is {shown(token)}, to which the model gives a
probability of {seen.token.p:.3f} (its own first choice is {shown(seen.prediction.text)}). The page is
written by `python docs/make_story.py memlens-demo "{prompt}" "{token}"`; the model is the bundled one, the index
the demo's. [Three memories](findings.md) has more of the first memory in the last table.

```
memlens trace memlens-demo "{prompt}" --token "{token}"
```

## The layers

A layer reads the residual r, its memories add y, and o = r + y goes on. What each of the three would predict, were it
the last state of the model, and the probability of {shown(token)} in o. The last column says which case of the paper's
Figure 11 the layer is: does o keep the residual's prediction, take y's, or is it a compromise that neither made?

| layer | r predicts | y predicts | o predicts | p of {shown(token)} | case |
| --- | --- | --- | --- | --- | --- |
{chr(10).join(rows)}

From layer {seen.settled} on the prediction does not change any more. The logit of {shown(token)},
{seen.logit:.2f}, is an exact sum: {parts}.

## What happened in each

{(chr(10) * 2).join(layer_words(layer, seen) for layer in seen.layers)}

## Which memories it needed

The {NEEDED} memories that did most to the logit, whatever their layer; each is silenced alone, and its loss is
measured by running the model again. What a memory adds to a logit and what the model loses without it are not the
same: later layers read what earlier ones wrote.

| memory | on the logit | p of {shown(token)} without it | fires on |
| --- | --- | --- | --- |
{chr(10).join(silenced)}

Without all {NEEDED} at once the probability of {shown(token)} goes from {seen.token.p:.3f} to
{together.after.token.p:.3f}, and the model says {shown(together.after.prediction.text)}.
"""


def main() -> None:
    folder, prompt, token = sys.argv[1:]
    index = memlens.open_index(folder)
    PAGE.write_text(story_page(index.load_model(), index, prompt, token), encoding="utf-8")


if __name__ == "__main__":
    main()
