"""The trained mixture of experts has learned its text and uses all experts."""

from pathlib import Path

import pytest
import torch

import memlens
from memlens.index.memory import read_expert

FOLDER = Path(__file__).parent / "mixture"
BUNDLED = Path(memlens.__file__).parent / "bundled" / "prose"


def test_it_predicts_better_than_chance_and_uses_all_experts(tmp_path: Path) -> None:
    model = memlens.load(FOLDER)
    text = (BUNDLED / "birds.txt").read_text(encoding="utf-8")[:800]
    ids = torch.tensor([model.tokenizer.encode([text])[0].ids[:200]])
    logs = torch.log_softmax(model.logits(ids)[0, :-1].float(), -1)
    assert -float(logs.gather(1, ids[0, 1:, None]).mean()) < 5.0  # chance is log 1024 = 6.9
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    index = memlens.scan(model, tmp_path / "text.txt", out=tmp_path / "index", top=5, threads=1)
    experts = [read_expert(index, f"L3E{expert}") for expert in range(8)]
    assert sum(one.chosen or 0 for one in experts) == 2 * index.manifest.counts.prefixes
    assert sum(one.share or 0 for one in experts) == pytest.approx(2)
    assert sum((one.chosen or 0) > 0 for one in experts) >= 4
    assert [group.kind for group in model.layers[0].groups] == ["dense"]
    assert {group.kind for group in model.layers[1].groups} == {"shared", "routed"}
