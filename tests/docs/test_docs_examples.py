"""The Python and the commands of the pages run, in their order, with a tiny model in the place of gpt2."""

import ast
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from docs_pages import ROOT, blocks

import memlens
from memlens.cli import main
from memlens.testing import save_tiny

TRACE = (ROOT / "docs" / "trace.md").read_text(encoding="utf-8")
TRACE = TRACE.replace('" Paris"', '" the"').replace('" Rome"', '" river"')  # the tiny model knows no cities


@pytest.fixture
def newcomer(tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model called gpt2 whose memory L5N94 the texts beside it fire."""
    save_tiny(tmp_path / "gpt2", "gpt2", n_layer=6, n_inner=900, n_positions=64, seed=1)
    shutil.copytree(tiny_text.parent, tmp_path / "my-texts")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


@pytest.fixture
def reader(newcomer: Path) -> Path:
    """The same with an index and its values."""
    memlens.scan(newcomer / "gpt2", newcomer / "my-texts", out=newcomer / "gpt2-index", top=3, threads=1)
    memlens.values(newcomer / "gpt2-index", top=10, threads=1)
    return newcomer


def run_python(page: str) -> dict[str, Any]:
    """The names that a page's code has left; every expression, which a notebook would show, has a value."""
    names: dict[str, Any] = {}
    parts = [block.code for block in blocks(page) if block.language == "python"]
    assert parts
    for statement in (statement for part in parts for statement in ast.parse(part).body):
        if isinstance(statement, ast.Expr):
            assert eval(ast.unparse(statement), names) is not None or "save(" in ast.unparse(statement)
        else:
            exec(compile(ast.Module([statement], []), "page", "exec"), names)
    return names


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md", "docs/api.md"])
def test_the_python_of_a_page_runs(page: str, newcomer: Path) -> None:
    run_python((ROOT / page).read_text(encoding="utf-8"))
    assert (newcomer / "gpt2-index" / "manifest.json").is_file()


def test_the_python_of_the_page_on_other_libraries_runs(newcomer: Path) -> None:
    names = run_python((ROOT / "docs" / "bridges.md").read_text(encoding="utf-8"))
    assert not names["logits"].equal(names["network"](input_ids=names["tokens"]).logits)


def test_the_python_of_the_page_on_tracing_runs(reader: Path) -> None:
    names = run_python(TRACE)
    assert memlens.load(reader / "edited-model").fingerprint() != names["model"].fingerprint()
    assert names["again"].fingerprint == names["model"].fingerprint()
    assert len(names["group"]) > 0 and names["drawn"].text != "" and names["edited"].token.text == " river"


def test_the_commands_of_the_page_on_tracing_run(reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for block in blocks(TRACE) if not block.language for line in block.code.splitlines()]
    assert len(lines) >= 7
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "memlens" and main(arguments) == 0, (line, capsys.readouterr())
    assert (reader / "edits.json").is_file()


def test_the_commands_of_the_page_on_circuits_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "circuits.md").read_text(encoding="utf-8")
    lines = [line for block in blocks(page) for line in block.code.splitlines() if "memlens circuit bundled" in line]
    assert len(lines) == 3
    for line in lines:
        assert main(shlex.split(line)[1:]) == 0, (line, capsys.readouterr())
    assert (tmp_path / "graph.json").is_file() and (tmp_path / "graph.svg").is_file()
