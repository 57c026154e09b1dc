"""Write the list of model types in docs/your-model.md: every type of transformers, proven or rejected.

Run `python docs/make_models.py` when transformers changes. It takes one or two minutes.
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
        "### Text models",
        "",
        *outcomes(causal_types()),
        "",
        "### Multimodal models",
        "",
        "Only their text stack is analyzed.",
        "",
        *outcomes(composite_types()),
    ]
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


def outcomes(types: Sequence[str]) -> list[str]:
    """Return the lines of the page about these types."""
    dense, mixtures, rejected, unbuilt = [], [], [], []
    for model_type in types:
        name, kinds = f"`{model_type}`", kinds_of_memories(model_type)
        if isinstance(kinds, set):
            (mixtures if "routed" in kinds else dense).append(name)
        elif isinstance(kinds, NotBuildable):
            unbuilt.append(name)
        else:
            reason = str(kinds).split("memories: ", 1)[1].removesuffix("; see docs/your-model.md")
            rejected.append((reason.removeprefix("layer 0: "), name))
    reasons = {reason: [name for other, name in rejected if other == reason] for reason, _name in rejected}
    return [
        f"Of {len(types)} types, {len(dense) + len(mixtures)} are proven ({len(mixtures)} of them with routed experts) "
        f"and {len(rejected)} are rejected. For {len(unbuilt)}, no tiny network can be built.",
        "",
        f"**Proven, {len(dense)} without routed experts**: {', '.join(dense)}.",
        "",
        f"**Proven, {len(mixtures)} with routed experts**: {', '.join(mixtures)}.",
        "",
        "| rejected | reason |",
        "| --- | --- |",
        *(f"| {', '.join(names)} | {reason} |" for reason, names in sorted(reasons.items(), key=lambda item: item[1])),
        "",
        f"**Not tried**: {', '.join(unbuilt)}.",
    ]


if __name__ == "__main__":
    main()
