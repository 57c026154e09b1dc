"""`memlens compare` on a command line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from memlens.cli import main
from memlens.index.reader import Index

Indexes = dict[str, Index]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["compare", *(str(argument) for argument in arguments)])
    return code, *capsys.readouterr()


def test_it_prints_the_most_changed_memories_and_the_same_as_json(
    indexes: Indexes, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = indexes["base"].folder, indexes["tuned"].folder
    code, told, _ = run(capsys, *folders, "--json", "--top", 4)
    content = json.loads(told)
    assert code == 0 and len(content["changes"]) == 4 and content["memories"] == 120
    code, shown, _ = run(capsys, *folders, "--top", 4)
    assert code == 0 and "one corpus" in shown and "two models" in shown
    lines = shown.splitlines()[-4:]
    assert [line.split()[0] for line in lines] == [change["before"]["memory"] for change in content["changes"]]


@pytest.mark.parametrize("by", ["triggers", "values", "patterns"])
def test_two_layers_are_shown_with_their_counterparts(
    indexes: Indexes, capsys: pytest.CaptureFixture[str], by: str
) -> None:
    folder = indexes["base"].folder
    code, shown, _ = run(capsys, folder, folder, "--layers", "0:2", "--by", by, "--alike", "--top", 3)
    assert code == 0 and "with counterpart" in shown and "0:2" in shown
    assert shown.splitlines()[-1].split()[1] == "→"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{base}", "{wide}"], "--layers 3:5"),
        (["{base}", "nowhere"], "there is no index folder nowhere"),
        (["{base}"], "missing argument"),
        (["{base}", "{tuned}", "--by", "names"], "--by is 'names'"),
        (["{base}", "{tuned}", "--layers", "a:b"], "like 3:5"),
        (["{base}", "{bare}", "--by", "values"], "memlens values"),
    ],
)
def test_bad_input_is_one_line(
    indexes: Indexes, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    folders = {name: index.folder for name, index in indexes.items() if " " not in name}
    code, out, err = run(capsys, *(argument.format(**folders) for argument in arguments))
    assert (code, out) == (2, "") and err.count("\n") == 1 and words in err


def test_a_damaged_table_is_named(indexes: Indexes, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(indexes["tuned"].folder, tmp_path / "copy"))
    (copy / "triggers.parquet").write_bytes(b"PAR1 no longer")
    code, _, err = run(capsys, indexes["base"].folder, copy)
    assert code == 2 and "triggers.parquet is damaged" in err and err.count("\n") == 1


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("by", ["triggers", "values", "patterns"])
def test_lines_fit_a_terminal_and_no_name_or_number_is_cut(
    indexes: Indexes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int, by: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    folder = indexes["base"].folder
    code, shown, _ = run(capsys, folder, folder, "--layers", "0:2", "--by", by, "--top", 40)
    lines = shown.split("\n\n")[-1].splitlines()[1:]
    assert code == 0 and len(lines) > 5 and max(map(len, lines)) <= columns
    for line in lines:
        assert re.match(r"L0N\d+ → L2N\d+ +[\d.]+%", line), line


def test_text_of_a_corpus_reaches_no_terminal_as_it_is(indexes: Indexes, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = run(capsys, indexes["base"].folder, indexes["tuned"].folder, "--top", 120)
    assert code == 0 and "\x1b" not in shown
