"""`memlens patterns` and `memlens annotate` as commands."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from index_by_hand import write_index
from memlens.index.reader import Index

TEXTS = [f"On day {n} the free press was read by {n} people." for n in range(300)]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def index(tmp_path: Path) -> Index:
    memories = {(0, memory): [(s, 5) for s in range(memory, memory + 20)] for memory in range(3)}
    return write_index(tmp_path / "index", TEXTS, memories)


def test_patterns_are_computed_summarised_and_browsed(index: Index, run: Run) -> None:
    code, out, _ = run("patterns", index.folder, "--json")
    assert code == 0 and json.loads(out)["rate"] == 0.01
    descriptions = {row["description"] for row in index.table("patterns").to_pylist()}
    assert descriptions == {'ends with "the free press"'}
    code, out, _ = run("patterns", index.folder, "--shared")
    assert code == 0 and "the free press" in out and "L0N2" in out
    code, out, _ = run("patterns", index.folder, "--related", "L0N0", "--json")
    assert [row["name"] for row in json.loads(out)] == ["L0N1", "L0N2"]
    code, out, _ = run("patterns", index.folder, "--duplicates")
    assert code == 0 and "0.90" in out


def test_what_patterns_lack_without_values_is_said(index: Index, run: Run, tiny_gpt2_values: Index, copy_of) -> None:
    assert "run `memlens values`" in run("patterns", index.folder)[2]
    assert "run `memlens values`" not in run("patterns", copy_of(tiny_gpt2_values, "with-values").folder)[2]


def test_a_narrow_screen_cuts_no_number_short(index: Index, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("patterns", index.folder)[0] == 0
    monkeypatch.setenv("COLUMNS", "40")
    code, out, _ = run("patterns", index.folder, "--shared")
    assert code == 0 and "…" not in out and all(f"L0N{memory}" in out for memory in range(3))


@pytest.mark.parametrize(
    "options",
    [
        *("patterns --top 2", "patterns --rate 1.5", "patterns --background 3", "patterns --seed -1"),
        *("patterns --related L7N0", "patterns --memory L0N0", "patterns --explainer nowhere --memory L0N0"),
        *("patterns --shared --duplicates", "patterns --explainer http://127.0.0.1:9"),
        *("patterns --duplicates --limit -1", "patterns --duplicates --limit 0"),
        *(
            "annotate judge",
            "annotate label",
            "annotate label --annotator ann",
            "annotate agreement",
            "annotate compare",
        ),
        "annotate label --annotator ann --memory L0N0 --pattern shallow:0,one:x",
        "annotate label --annotator ann --memory L0N0 --pattern shallow:0,1:x",
        *("annotate undo --annotator ann --memory L0N0", "annotate finish --annotator ann"),
        *("annotate import --file nowhere.json", "annotate export --format xml", "annotate sample --per-layer 0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(index: Index, refused: Callable[..., str], options: str) -> None:
    verb, *rest = options.split()
    refused(verb, index.folder, *rest)


def test_a_study_from_sample_to_agreement(index: Index, run: Run, tmp_path: Path) -> None:
    code, out, _ = run("annotate", index.folder, "sample", "--per-layer", 2, "--seed", 5)
    names = out.split()
    assert code == 0 and len(names) == 2
    for person, kinds in (("ann", ("shallow", "shallow")), ("bob", ("shallow", "semantic"))):
        for name, kind in zip(names, kinds, strict=True):
            given = ("--annotator", person, "--memory", name, "--pattern", f"{kind}:0,1,2:the press: free")
            assert run("annotate", index.folder, "label", *given)[0] == 0
        assert run("annotate", index.folder, "finish", "--annotator", person)[0] == 0
    (pair,) = json.loads(run("annotate", index.folder, "agreement", "--json")[1])
    assert (pair["memories"], pair["same_class"], pair["jaccard_shallow"]) == (2, 1, 0.5)
    for name in ("labels.csv", "labels.json"):
        assert run("annotate", index.folder, "export", "--file", tmp_path / name)[0] == 0
    assert "the press: free" in (tmp_path / "labels.csv").read_text(encoding="utf-8")
    note = run("annotate", index.folder, "import", "--file", tmp_path / "labels.json")[2]
    assert note == "0 new events were imported\n"
    assert run("patterns", index.folder)[0] == 0
    rows = json.loads(run("annotate", index.folder, "compare", "--json")[1])
    assert {row["annotator"] for row in rows} == {"ann", "bob"}
    assert json.loads(run("annotate", index.folder, "status", "--json")[1])[0]["finished"] is True
