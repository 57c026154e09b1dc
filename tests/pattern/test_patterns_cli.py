"""`memlens patterns` and `memlens annotate` as commands."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from index_by_hand import write_index
from memlens.cli.annotate import annotate
from memlens.cli.app import guarded
from memlens.cli.patterns import patterns
from memlens.index.reader import Index

TEXTS = [f"On day {n} the free press was read by {n} people." for n in range(300)]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def index(tmp_path: Path) -> Index:
    memories = {(0, memory): [(s, 5) for s in range(memory, memory + 20)] for memory in range(3)}
    return write_index(tmp_path / "index", TEXTS, memories)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    app = typer.Typer()
    for verb in (patterns, annotate):
        app.command(verb.__name__)(guarded(verb))

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = app([str(argument) for argument in arguments], standalone_mode=False)
        return (code, *capsys.readouterr())

    return run


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


def test_a_narrow_screen_cuts_no_number_short(index: Index, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("patterns", index.folder)[0] == 0
    monkeypatch.setenv("COLUMNS", "40")
    code, out, _ = run("patterns", index.folder, "--shared")
    assert code == 0 and "…" not in out and all(f"L0N{memory}" in out for memory in range(3))


@pytest.mark.parametrize(
    "options",
    [("--top", "2"), ("--rate", "1.5"), ("--background", "3"), ("--seed", "-1"), ("--related", "L7N0"),
     ("--memory", "L0N0"), ("--explainer", "nowhere", "--memory", "L0N0"), ("--shared", "--duplicates"),
     ("--explainer", "http://127.0.0.1:9"), ("--duplicates", "--limit", "-1"), ("--duplicates", "--limit", "0")],
)  # fmt: skip
def test_wrong_options_are_refused_in_one_line(index: Index, run: Run, options: tuple[str, ...]) -> None:
    code, out, err = run("patterns", index.folder, *options)
    assert code == 2 and out == "" and err.count("\n") == 1 and err.startswith("memlens: ")


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
    assert run("annotate", index.folder, "import", "--file", tmp_path / "labels.json")[2] == "0 new labels or events\n"
    assert run("patterns", index.folder)[0] == 0
    rows = json.loads(run("annotate", index.folder, "compare", "--json")[1])
    assert {row["annotator"] for row in rows} == {"ann", "bob"}
    assert json.loads(run("annotate", index.folder, "status", "--json")[1])[0]["finished"] is True


@pytest.mark.parametrize(
    "arguments",
    [("judge",), ("label",), ("label", "--annotator", "ann"), ("agreement",), ("compare",),
     ("label", "--annotator", "ann", "--memory", "L0N0", "--pattern", "shallow:0,one:x"),
     ("label", "--annotator", "ann", "--memory", "L0N0", "--pattern", "shallow:0,1:x"),
     ("undo", "--annotator", "ann", "--memory", "L0N0"), ("finish", "--annotator", "ann"),
     ("import", "--file", "nowhere.json"), ("export", "--format", "xml"), ("sample", "--per-layer", "0")],
)  # fmt: skip
def test_wrong_annotations_are_refused_in_one_line(index: Index, run: Run, arguments: tuple[str, ...]) -> None:
    code, out, err = run("annotate", index.folder, *arguments)
    assert code == 2 and out == "" and err.count("\n") == 1 and err.startswith("memlens: ")
