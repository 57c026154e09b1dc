"""docs/trace.md: its Python and its commands run, in the order of the page, with a tiny model in the place of gpt2."""

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import memlens
from memlens.cli import main
from memlens.testing import save_tiny

PAGE = (Path(__file__).parents[2] / "docs" / "trace.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
TOKENS = {'" Paris"': '" the"', '" Rome"': '" river"'}  # the tiny model knows no cities


def with_own_tokens(code: str) -> str:
    for token, own in TOKENS.items():
        code = code.replace(token, own)
    return code


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model called gpt2 that has a memory L5N94, and an index of it with values."""
    save_tiny(tmp_path / "gpt2", "gpt2", n_layer=6, n_inner=900, n_positions=64)
    (tmp_path / "text.txt").write_text("The river runs to the sea. Rain fell on the hills.\n")
    memlens.scan(tmp_path / "gpt2", tmp_path / "text.txt", out=tmp_path / "gpt2-index", top=3, threads=1)
    memlens.values(tmp_path / "gpt2-index", top=10, threads=1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def test_the_python_of_the_page_runs(reader: Path) -> None:
    parts = [with_own_tokens(code) for language, code in BLOCKS if language == "python"]
    assert len(parts) >= 9
    names: dict[str, Any] = {}
    for part in parts:
        for statement in ast.parse(part).body:
            if isinstance(statement, ast.Expr):
                assert eval(ast.unparse(statement), names) is not None or "save(" in ast.unparse(statement)
            else:
                exec(compile(ast.Module([statement], []), "docs/trace.md", "exec"), names)
    assert memlens.load(reader / "edited-model").fingerprint() != names["model"].fingerprint()
    assert names["again"].fingerprint == names["model"].fingerprint()
    assert len(names["group"]) > 0 and names["drawn"].text != "" and names["edited"].token.text == " river"


def test_the_commands_of_the_page_run(reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for language, code in BLOCKS if not language for line in with_own_tokens(code).splitlines()]
    assert len(lines) >= 7
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "memlens" and main(arguments) == 0, (line, capsys.readouterr())
    assert (reader / "edits.json").is_file()
