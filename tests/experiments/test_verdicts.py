"""People's verdicts on what the last layer changes: kept, taken back, exchanged, counted beside the hint."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memlens
from memlens.annotations.files import export_verdicts, import_verdicts
from memlens.annotations.labels import Annotations, Example, Verdicts
from memlens.annotations.store import VERDICTS, history_mark
from memlens.errors import MemlensError, SettingError, UnknownName
from memlens.experiments.last_layer import summarize_verdicts
from memlens.experiments.registry import EXPERIMENTS
from memlens.experiments.run import is_made, is_outdated, run
from memlens.models.memory_model import MemoryModel

pytestmark = pytest.mark.parametrize("scanned", ["gpt2"], indirect=True)
LAST = EXPERIMENTS["last-layer"]
SAMPLE = 60


@pytest.fixture
def judged(fresh: tuple[memlens.Index, MemoryModel]) -> tuple[memlens.Index, MemoryModel, list[Example]]:
    index, model = fresh
    rows = run(index, "last-layer", model, sample=SAMPLE)["last-layer"].to_pylist()
    examples = [Example.of(row) for row in rows]
    assert len(examples) >= 4 and [example.name for example in examples] == [row["example"] for row in rows]
    return index, model, examples


Judged = tuple[memlens.Index, MemoryModel, list[Example]]


def test_the_last_verdict_counts_and_undo_brings_back_the_one_before(judged: Judged) -> None:
    index, _, examples = judged
    with Verdicts(index) as notes:
        notes.save("ann", examples[0], "related")
        notes.save("ann", examples[0], "distant")
        assert [one.verdict for one in notes.verdicts("ann")] == ["distant"]
        before = notes.undo("ann", examples[0].name)
        assert before is not None and before.verdict == "related" and notes.verdicts("ann") == [before]
        assert notes.undo("ann", examples[0].name) is None and notes.verdicts() == []
        with pytest.raises(SettingError, match="no verdict on"):
            notes.undo("ann", examples[0].name)
        assert [event["kind"] for event in notes.history()] == ["verdict", "verdict", "undo", "undo"]
        for person, verdict, kind in (("ann", "near", SettingError), (" ", "related", UnknownName)):
            with pytest.raises(kind):
                notes.save(person, examples[0], verdict)
        assert len(notes.history()) == 4


def test_verdicts_cannot_be_changed_even_with_sql(judged: Judged) -> None:
    index, _, examples = judged
    with Verdicts(index) as notes:
        notes.save("ann", examples[0], "related")
    database = sqlite3.connect(index.folder / "annotations.sqlite")
    for statement in ("DELETE FROM verdicts", "UPDATE verdicts SET annotator = 'bob'"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            database.execute(statement)
    database.close()


def test_a_file_of_labels_alone_takes_verdicts_too(judged: Judged) -> None:
    index, _, examples = judged
    with Annotations(index) as labels:
        labels.save("ann", "L0N0", [])
    database = sqlite3.connect(index.folder / "annotations.sqlite")
    database.execute("DROP TABLE verdicts")  # as a file that was made before there were any
    database.close()
    assert history_mark(index, VERDICTS) is None
    with Verdicts(index) as notes:
        notes.save("bob", examples[0], "related")
    with Annotations(index) as labels:
        assert labels.annotators() == ["ann"]


def test_the_table_counts_what_people_say_now(judged: Judged) -> None:
    index, model, examples = judged
    said = {"ann": ("related", "distant", "distant"), "bob": ("related", "related", "distant")}
    assert not is_outdated(index, LAST) and is_made(index, LAST, sample=SAMPLE)
    with Verdicts(index) as notes:
        for person, verdicts in said.items():
            for example, verdict in zip(examples, verdicts, strict=False):
                notes.save(person, example, verdict)
        notes.save("ann", examples[3], "related")
        notes.undo("ann", examples[3].name)
    assert is_outdated(index, LAST) and not is_made(index, LAST, sample=SAMPLE)
    rows = run(index, "last-layer", model, sample=SAMPLE)["last-layer"].to_pylist()
    assert not is_outdated(index, LAST) and is_made(index, LAST, sample=SAMPLE)
    counted = [(row["related"], row["distant"]) for row in rows]
    assert counted[:3] == [(2, 0), (1, 1), (0, 2)] and set(counted[3:]) <= {(0, 0)}
    summary = summarize_verdicts(rows)
    assert summary is not None and (summary.related, summary.distant, summary.split) == (1, 1, 1)
    assert (summary.cosine_related, summary.cosine_distant) == (rows[0]["cosine"], rows[2]["cosine"])
    assert str(summary).startswith(f"people judged 3 of {len(rows)}: 1 distant, 1 related, 1 undecided; mean cosine")
    assert summarize_verdicts(rows[3:]) is None


def test_an_example_keeps_its_name_in_another_sample(judged: Judged) -> None:
    index, model, examples = judged
    with Verdicts(index) as notes:
        for example in examples:
            notes.save("ann", example, "distant")
    rows = run(index, "last-layer", model, sample=SAMPLE + 40)["last-layer"].to_pylist()
    names = {example.name for example in examples}
    assert names < {row["example"] for row in rows}  # a larger sample holds every smaller one
    assert {row["example"] for row in rows if row["distant"]} == names


def copy_of(index: memlens.Index, folder: Path) -> memlens.Index:
    return memlens.open_index(shutil.copytree(index.folder, folder, ignore=shutil.ignore_patterns("annotations*")))


def test_json_carries_the_whole_history_and_is_imported_once(judged: Judged, tmp_path: Path) -> None:
    index, _, examples = judged
    with Verdicts(index) as notes, Verdicts(copy_of(index, tmp_path / "copy")) as other:
        notes.save("ann", examples[0], "related")
        notes.save("ann", examples[1], "related")
        notes.undo("ann", examples[1].name)
        notes.save("bob", examples[0], "distant")
        text = export_verdicts(notes, "json")
        assert import_verdicts(other, text, "json") == 4 and import_verdicts(other, text, "json") == 0
        assert other.verdicts() == notes.verdicts() and export_verdicts(other, "json") == text
        assert "bob" not in export_verdicts(notes, "json", "ann") and "bob" not in export_verdicts(notes, "csv", "ann")


def test_csv_brings_the_same_verdicts_back(judged: Judged, tmp_path: Path) -> None:
    index, _, examples = judged
    odd = Example(2, 'a "quoted", text\nof two lines', 3, ",", 4, "\n")
    with Verdicts(index) as notes, Verdicts(copy_of(index, tmp_path / "copy")) as other:
        for example, verdict in ((examples[0], "related"), (odd, "distant")):
            notes.save("ann", example, verdict)
        assert import_verdicts(other, export_verdicts(notes, "csv"), "csv") == 2
        assert other.verdicts() == notes.verdicts()


def spoil_name(text: str) -> str:
    content = json.loads(text)
    content["events"][0]["content"]["output"] += 1
    return json.dumps(content)


def spoil_verdict(text: str) -> str:
    return text.replace('"related"', '"near"')


def other_model(text: str) -> str:
    return json.dumps(json.loads(text) | {"model": "another"})


def of_labels(text: str) -> str:
    return text.replace("memlens_verdicts", "memlens_annotations")


def endless_layer(text: str) -> str:
    return text.replace('"layer": ', '"layer": Infinity, "was": ')


WRONG: list[tuple[str, Callable[[str], str]]] = [
    ("json", lambda text: "{"),
    ("json", lambda text: "[]"),
    ("json", lambda text: "[" * 100_000),
    ("json", lambda text: json.dumps(json.loads(text) | {"events": [{}]})),
    ("json", lambda text: json.dumps(json.loads(text) | {"events": [7]})),
    ("json", spoil_name),
    ("json", spoil_verdict),
    ("json", endless_layer),
    ("json", other_model),
    ("json", of_labels),
    ("csv", lambda text: "a,b\n1,2\n"),
    ("csv", lambda text: text.replace("related", "near", 1) if text.count("related") else text),
    ("csv", lambda text: text + "ann,only three,cells\n"),
    ("csv", lambda text: text + "x" * 200_000),
    ("csv", lambda text: text.replace(text.splitlines()[1].split(",")[1], "0" * 12)),
    ("xml", lambda text: text),
]


@pytest.mark.parametrize(("format", "spoil"), WRONG)
def test_a_wrong_file_is_refused_as_a_whole(
    judged: Judged, tmp_path: Path, format: str, spoil: Callable[[str], str]
) -> None:
    index, _, examples = judged
    with Verdicts(index) as notes, Verdicts(copy_of(index, tmp_path / "copy")) as other:
        notes.save("ann", examples[0], "related")
        text = spoil(export_verdicts(notes, "csv" if format == "csv" else "json"))
        with pytest.raises(MemlensError) as refused:
            import_verdicts(other, text, format)
        assert "\n" not in str(refused.value) and other.history() == []


def test_the_command_lists_judges_takes_back_and_exchanges(
    judged: Judged, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from memlens.cli import main

    index, _, examples = judged

    def ran(*arguments: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["annotate", str(index.folder), "verdicts", *map(str, arguments)])
        return (code, *capsys.readouterr())

    name = examples[1].name
    for person, verdict in (("ann", "related"), ("bob", "distant")):
        assert ran("judge", "--annotator", person, "--example", name, "--verdict", verdict)[0] == 0
    listed = {row["example"]: row for row in json.loads(ran("list", "--annotator", "ann", "--json")[1])}
    assert [*listed] == [example.name for example in examples]
    assert listed[name]["verdict"] == "related" and listed[examples[0].name]["verdict"] is None
    assert "related" not in ran()[1] and "distant" not in ran()[1]  # nobody's verdict sways a reader
    assert json.loads(ran("status", "--json")[1])[0] == {
        "annotator": "ann", "judged": 1, "examples": len(examples), "all": 1
    }  # fmt: skip
    for file in ("verdicts.csv", "verdicts.json"):
        assert ran("export", "--file", tmp_path / file)[0] == 0
    assert ran("import", "--file", tmp_path / "verdicts.json")[2] == "0 new verdicts or events\n"
    assert ran("undo", "--annotator", "ann", "--example", name)[2] == f"{name}: no verdict again\n"
    for wrong in (
        ["praise"], ["judge"], ["judge", "--annotator", "ann"], ["undo", "--annotator", "ann", "--example", name],
        ["judge", "--annotator", "ann", "--example", name], ["export", "--annotator", "eve"],
        ["judge", "--annotator", "ann", "--example", "nothing", "--verdict", "related"],
        ["judge", "--annotator", "ann", "--example", name, "--verdict", "near"],
        ["import", "--file", tmp_path / "nowhere.json"], ["export", "--file", index.folder / "x.json"],
    ):  # fmt: skip
        code, out, err = ran(*wrong)
        assert code == 2 and out == "" and err.startswith("memlens: ") and err.count("\n") == 1, wrong
    assert main(["annotate", str(index.folder), "status", "list"]) == 2
