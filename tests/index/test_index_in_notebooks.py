"""A notebook shades every token of a memory's triggers by its coefficient."""

import re
from pathlib import Path

import pytest
import torch

import memlens
from memlens.errors import UnknownName
from memlens.index.reader import Index
from memlens.testing import tiny_model, tiny_tokenizer


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_memory_is_shaded_by_its_coefficients(family: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The river runs to the sea. <b>Rain</b> fell on the hills.\n", encoding="utf-8")
    model = memlens.load(tiny_model(family), tokenizer=tiny_tokenizer())
    index = memlens.scan(model, tmp_path / "text.txt", out=tmp_path / "index", top=5)
    shown = index["L1N3"]
    assert index.model is model and len(shown.shading) == len(shown.triggers["top"]) > 0
    for one, trigger in zip(shown.shading, shown.triggers["top"], strict=True):
        assert one.coefficients[one.position] == pytest.approx(trigger.coefficient, rel=1e-5)
        ids = torch.tensor([index.sentences([trigger.prefix.sentence])[trigger.prefix.sentence]["tokens"]])
        assert len(one.tokens) == min(trigger.prefix.position + 2, ids.shape[1])
    page = shown._repr_html_()
    drawn = [float(number) for number in re.findall(r'<span title="([^"]+)"', page)]
    expected = [m for one in shown.shading for m in one.coefficients[: one.position + 1]]
    assert drawn == pytest.approx(expected, rel=1e-3, abs=1e-4) and "<b>Rain" not in page
    bare = memlens.open_index(index.folder)["L1N3"]
    assert not bare.shading and "index.load_model()" in bare._repr_html_()


def test_a_chart_of_no_experiment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The river runs to the sea.\n", encoding="utf-8")
    model = memlens.load(tiny_model("gpt2"), tokenizer=tiny_tokenizer())
    index = memlens.scan(model, tmp_path / "text.txt", out=tmp_path / "index", top=5)
    with pytest.raises(UnknownName, match="no experiment 'agrement'; known: "):
        index.chart("agrement")
    memlens.values(index, model=model)
    memlens.experiment(index, "agreement", model=model)
    assert index.chart("agreement").to_dict()["title"] == "share of memories that agree"


def test_a_memory_has_a_short_repr(tiny_gpt2_index: Index) -> None:
    shown = repr(tiny_gpt2_index["L1N3"])
    assert shown.startswith("<L1N3 of ") and len(shown) < 200 and "\n" not in shown
