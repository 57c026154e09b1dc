"""Writes the table of docs/your-model.md: every language model type of transformers, proven or refused.

python docs/make_models.py         # a minute or two; run it when transformers changes
"""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from memlens.testing import NotBuildable, causal_types, composite_types, kinds_of_memories

PAGE = Path(__file__).parent / "your-model.md"
BEGIN, END = "<!-- types -->", "<!-- end of the types -->"


def main() -> None:
    torch.set_num_threads(1)
    lines = [
        f"With transformers {version('transformers')}.",
        "",
        "### Language models of text",
        "",
        *outcomes(causal_types()),
        "",
        "### Language models beside images, video or sound",
        "",
        "Their text stack is read; images and sound are not.",
        "",
        *outcomes(composite_types()),
    ]
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


def outcomes(types: Sequence[str]) -> list[str]:
    """Lines on what became of each of some types."""
    dense, mixtures, refused, unbuilt = [], [], [], []
    for model_type in types:
        name, kinds = f"`{model_type}`", kinds_of_memories(model_type)
        if isinstance(kinds, set):
            (mixtures if "routed" in kinds else dense).append(name)
        elif isinstance(kinds, NotBuildable):
            unbuilt.append(name)
        else:
            reason = str(kinds).split("memories: ", 1)[1].removesuffix("; see docs/your-model.md")
            refused.append((reason.removeprefix("layer 0: "), name))
    reasons = {reason: [name for other, name in refused if other == reason] for reason, _name in refused}
    return [
        f"Of {len(types)} types {len(dense) + len(mixtures)} are proven, {len(mixtures)} of them with experts behind a "
        f"router; {len(refused)} are refused; of {len(unbuilt)} no tiny network can be built to try.",
        "",
        f"**Proven, {len(dense)} without a router**: {', '.join(dense)}.",
        "",
        f"**Proven, {len(mixtures)} with experts**: {', '.join(mixtures)}.",
        "",
        "| refused | because |",
        "| --- | --- |",
        *(f"| {', '.join(names)} | {reason} |" for reason, names in sorted(reasons.items(), key=lambda item: item[1])),
        "",
        f"**Not tried**: {', '.join(unbuilt)}.",
    ]


if __name__ == "__main__":
    main()
