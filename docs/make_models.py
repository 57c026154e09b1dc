"""Writes the table of docs/your-model.md: every causal LM type of the installed transformers, proven or refused.

python docs/make_models.py         # a minute or two; run it when transformers changes
"""

from importlib.metadata import version
from pathlib import Path

import torch

from memlens.errors import UnsupportedModel
from memlens.models.load import load
from memlens.testing_types import NotBuildable, causal_types, tiny_network

PAGE = Path(__file__).parent / "your-model.md"
BEGIN, END = "<!-- types -->", "<!-- end of the types -->"


def main() -> None:
    torch.set_num_threads(1)
    dense, mixtures, refused, unbuilt = [], [], [], []
    for model_type in causal_types():
        try:
            kinds = {group.kind for layer in load(tiny_network(model_type)).layers for group in layer.groups}
            (mixtures if "routed" in kinds else dense).append(f"`{model_type}`")
        except UnsupportedModel as error:
            reason = str(error).split("memories: ", 1)[1].removesuffix("; docs/your-model.md says what can be done")
            refused.append((reason.removeprefix("layer 0: "), f"`{model_type}`"))
        except NotBuildable:
            unbuilt.append(f"`{model_type}`")
    reasons = {reason: [name for other, name in refused if other == reason] for reason, _name in refused}
    lines = [
        f"With transformers {version('transformers')}: of {len(causal_types())} types {len(dense) + len(mixtures)} are "
        f"proven, {len(mixtures)} of them with experts behind a router; {len(refused)} are refused; of {len(unbuilt)} "
        "no tiny network can be built to try.",
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
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
