"""A notebook shades every token of a memory's triggers by its coefficient."""

import pickle
import re
from pathlib import Path

import pytest
import torch

import memlens
from memlens.errors import SettingError, UnknownName
from memlens.index.reader import Index
from memlens.index.search import SearchQuery, search
from memlens.testing import tiny_model, tiny_tokenizer
from memlens.text import visible


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


def test_a_query_result_has_a_short_repr_a_table_and_arrow(tiny_gpt2_index: Index) -> None:
    rows = tiny_gpt2_index.sql("SELECT layer, memory, '<b>' AS word FROM {memories} WHERE layer < $1", [2])
    assert isinstance(rows, list) and rows[0] == {"layer": 0, "memory": 0, "word": "<b>"}
    assert repr(rows).count("{") == 10 and repr(rows).endswith(f"... {len(rows) - 10:,} more rows]")
    assert "&lt;b&gt;" in rows._repr_html_() and rows._repr_html_().count("<tr>") == 11
    table = rows.to_arrow()
    assert (
        table.to_pylist() == rows == pickle.loads(pickle.dumps(rows))
        and str(table.schema.field("layer").type) == "int32"
    )
    frame = rows.to_pandas()  # pandas comes with the extra `datasets`
    assert list(frame.columns) == ["layer", "memory", "word"] and len(frame) == len(rows)
    empty = tiny_gpt2_index.sql("SELECT layer FROM {memories} WHERE layer = 99")
    assert repr(empty) == "[]" and empty.to_arrow().column_names == ["layer"] and "0 rows" in empty._repr_html_()


def test_a_search_finds_what_the_engine_finds_and_has_a_short_repr(tiny_gpt2_index: Index) -> None:
    index = tiny_gpt2_index
    found = index.search("river", limit=30, layers=(0, 1))
    assert found == search(index, SearchQuery(("river",), limit=30, layers=(0, 1))) and found.total > 10
    assert found == index.search("river", limit=30, layers="0-1")
    for options in ({"kind": "both?"}, {"agreement": "maybe"}, {"order": "size"}, {"place": "text"}):
        with pytest.raises(SettingError, match="choose one of"):
            index.search("river", **options)
    assert repr(found).splitlines()[0] == f"{found.total} memories" and len(repr(found).splitlines()) == 12
    assert found._repr_html_().count("<tr>") == len(found.found) + 1
    listed = index.search(order="frequency", limit=1).found[0]
    assert listed.number == index.sql("SELECT max(frequency) AS most FROM {memories}")[0]["most"]
    with pytest.raises(SettingError, match="unknown search option 'layer'"):
        index.search("river", layer=1)


def test_a_list_of_triggers_has_a_short_repr(tiny_gpt2_index: Index) -> None:
    triggers = next(found for n in range(40) if len(found := tiny_gpt2_index.triggers(f"L0N{n}")) > 3)
    lines = repr(triggers).splitlines()
    assert lines[0] == f"{len(triggers)} triggers" and len(lines) <= 12
    assert lines[1].endswith(f"«{visible(triggers[0].token)}»") and all(len(line) < 140 for line in lines)
