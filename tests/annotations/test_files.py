"""Import and export: JSON carries the whole history, CSV what holds now, and a wrong file changes nothing."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from people import COMMA, DAY, NEWS, PRESS, answers, first_answer, label, make_index, second_answer

from memlens.annotations.files import export_text, import_text, read_export
from memlens.annotations.records import LABELS, VERDICTS, Annotations, LabeledPattern, Sample, Verdict
from memlens.errors import MemlensError, SettingError
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.tracer.intervention import Intervention

both_tasks = pytest.mark.parametrize("task", [LABELS, VERDICTS])
LABEL_COLUMNS = "annotator,memory,kind,description,prefixes\n"
FORMULAS = ["=1+1", "'=1", "''-1", "@x", "- y"]
ONE_LABEL = LABEL_COLUMNS + "ann,L0N0,shallow,x,0 1 2\n"


@both_tasks
def test_json_carries_the_whole_history_and_is_imported_once(index: Index, copy: Index, task: str) -> None:
    first, other = first_answer(task, "ann"), first_answer(LABELS if task == VERDICTS else VERDICTS, "zoe")
    notes = Annotations(index)
    copied = Annotations(copy)
    notes.save(first, second_answer(task, "ann"), first_answer(task, "bob"), other)
    notes.undo(task, "ann", first.subject)
    if task == LABELS:
        for person in ("ann", "bob"):
            notes.finish(person)
    text = export_text(notes, task, "json")
    assert "zoe" not in text and "bob" not in export_text(notes, task, "json", "ann")
    assert import_text(copied, task, text, "json") == len(notes.history(task)) == (6 if task == LABELS else 4)
    assert import_text(copied, task, text, "json") == 0
    assert copied.history(task) == notes.history(task) and export_text(copied, task, "json") == text
    assert answers(copied, task, "ann") == [first]


@both_tasks
def test_csv_brings_the_same_answers_back(index: Index, copy: Index, task: str) -> None:
    own = [label("ann", "L0N0", PRESS, NEWS), label("ann", "L0N2")]
    verdicts = [Verdict("ann", DAY, "related"), Verdict("ann", COMMA, "distant")]
    notes = Annotations(index)
    copied = Annotations(copy)
    notes.save(*(own if task == LABELS else verdicts))
    text = export_text(notes, task, "csv", "ann")
    assert import_text(copied, task, text, "csv") == 2
    assert answers(copied, task, "ann") == answers(notes, task, "ann") == (own if task == LABELS else verdicts)
    assert export_text(copied, task, "csv", "ann") == text


@pytest.mark.parametrize("description", ["a\rb", "a\r\nb", 'c, "d";\t', "\u2028 عربى 🙂", "'", *FORMULAS])
def test_csv_carries_every_sign_of_a_description(index: Index, copy: Index, description: str) -> None:
    notes = Annotations(index)
    copied = Annotations(copy)
    notes.save(label("ann", "L0N0", LabeledPattern(description, "semantic", (0, 1, 2))))
    text = export_text(notes, LABELS, "csv", "ann")
    assert not any(cell[:1] in ("=", "+", "-", "@") for row in csv.reader(io.StringIO(text)) for cell in row)
    import_text(copied, LABELS, text, "csv")
    assert copied.labels_of("ann") == notes.labels_of("ann")


def test_a_file_that_a_spreadsheet_has_saved_is_read(index: Index, tmp_path: Path) -> None:
    file = tmp_path / "labels.csv"
    file.write_text(ONE_LABEL, "utf-8-sig")
    notes = Annotations(index)
    assert import_text(notes, LABELS, read_export(str(file)), "csv") == 1


def test_a_file_that_never_ends_or_is_no_export_by_its_size_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "huge.json").touch()
    os.truncate(tmp_path / "huge.json", 1 << 33)
    refused = {
        "/dev/zero": "not a regular file",
        "pipe.json": "not a regular file",
        "huge.json": "larger than",
        ".": "not a regular file",
    }
    for name, words in refused.items():
        with pytest.raises(SettingError, match="cannot read --file") as caught:
            read_export(str(tmp_path / name))
        assert words in str(caught.value) and "\n" not in str(caught.value)
        with pytest.raises(SettingError, match="cannot be read") as caught:
            Intervention.load(tmp_path / name)
        assert words in str(caught.value)


def test_an_export_keeps_quiet_about_people_who_have_not_finished(index: Index) -> None:
    notes = Annotations(index)
    notes.save(label("ann", "L0N0", PRESS))
    for format in ("json", "csv"):
        assert "press" not in export_text(notes, LABELS, format)
        assert "press" in export_text(notes, LABELS, format, "ann")
    notes.finish("ann")
    assert "press" in export_text(notes, LABELS, "csv")


Spoil = Callable[[str], str]


def given(text: str) -> Spoil:
    return lambda _: text


def with_file(**fields: Any) -> Spoil:
    return lambda text: json.dumps(json.loads(text) | fields)


def with_event(number: int, **fields: Any) -> Spoil:
    def spoil(text: str) -> str:
        file = json.loads(text)
        file["events"][number] |= fields
        return json.dumps(file)

    return spoil


def with_pattern(**fields: Any) -> Spoil:
    pattern = {"description": "x", "kind": "shallow", "prefixes": [0, 1, 2]}
    return with_event(1, content={"patterns": [pattern | fields]})


def with_verdict(**fields: Any) -> Spoil:
    return with_event(0, content=Verdict("ann", DAY, "related").content | fields)


ANY_JSON = [given("{"), given("[]"), given("[" * 100_000), with_file(events=[{}]), with_file(events=[7]),
            with_file(model="another"), with_event(0, kind="praise"), with_event(1, key="\ud800"),
            with_event(1, annotator=""), with_event(1, annotator="a\nb"), with_event(1, annotator="\ud800"),
            with_event(2, content={"undoes": ["a", "list"]})]  # fmt: skip
LABEL_JSON = [with_file(task=VERDICTS), with_file(corpus="another"), with_event(0, annotator="\ud800"),
              *(with_event(0, content={"memories": ["L0N0"], "top": 25, "seed": 0} | wrong)
                for wrong in ({"memories": "L0N0"}, {"top": "25"}, {"memories": ["L0N99"]})),
              with_event(1, subject="L0N99"), with_event(1, subject=0.5),
              with_pattern(description=5), with_pattern(description="\ud800"), with_pattern(prefixes=["0", "1", "2"]),
              with_pattern(prefixes=[0.5, 1.5, 2.5])]  # fmt: skip
VERDICT_JSON = [with_file(task=LABELS), with_verdict(output=99), with_verdict(verdict="near"),
                with_verdict(layer=float("inf")), with_event(0, subject="0" * 12)]  # fmt: skip
LABEL_CSV = [given("a,b\n1,2\n"), given(f"{ONE_LABEL}ann,L9N0,shallow,x,0 1 2\n"),
             *(given(LABEL_COLUMNS + row) for row in
               ("ann,L0N0,shallow,x,0 1\n", "ann,L0N0,deep,x,0 1 2\n", "ann,L0N0,shallow,x,0 one 2\n",
                "ann,L0N0,,,0 1 2\n", f"ann,L0N0,shallow,{'x' * 200_000},0 1 2\n"))]  # fmt: skip
VERDICT_CSV = [given("a,b\n1,2\n"), lambda text: text.replace("related", "near"),
               lambda text: text + "ann,only three,cells\n", lambda text: text + "x" * 200_000,
               lambda text: text.replace(DAY.name, "0" * 12), lambda text: text.replace(",3,", ",three,")]  # fmt: skip
WRONG = [
    *((LABELS, "json", spoil) for spoil in [*ANY_JSON, *LABEL_JSON]),
    *((VERDICTS, "json", spoil) for spoil in [*ANY_JSON, *VERDICT_JSON]),
    *((LABELS, "csv", spoil) for spoil in LABEL_CSV),
    *((VERDICTS, "csv", spoil) for spoil in VERDICT_CSV),
    (LABELS, "xml", given("")),
]


@pytest.mark.parametrize(("task", "format", "spoil"), WRONG)
def test_a_wrong_file_is_refused_as_a_whole(index: Index, copy: Index, task: str, format: str, spoil: Spoil) -> None:
    notes = Annotations(index)
    copied = Annotations(copy)
    if task == LABELS:
        notes.set_sample(Sample((MemoryId(0, 0),), 25, 0))
    else:
        notes.save(Verdict("ann", DAY, "distant"))
    answer = first_answer(task, "ann")
    notes.save(answer)
    notes.undo(task, "ann", answer.subject)
    notes.save(answer)
    text = spoil(export_text(notes, task, "csv" if format == "csv" else "json", "ann"))
    with pytest.raises(MemlensError) as refused:
        import_text(copied, task, text, format)
    assert "\n" not in str(refused.value) and copied.history(task) == []


def test_an_import_neither_changes_the_sample_of_labels_nor_what_a_finished_person_said(
    index: Index, copy: Index, tmp_path: Path
) -> None:
    sample = Sample((MemoryId(0, 0),), 25, 0)
    notes = Annotations(index)
    copied = Annotations(copy)
    notes.set_sample(sample)
    notes.save(label("ann", "L0N0", PRESS))
    notes.finish("ann")
    before = notes.history(LABELS)
    other = Annotations(make_index(tmp_path / "other"))
    other.set_sample(Sample((MemoryId(0, 1),), 25, 1))
    with pytest.raises(SettingError, match="different samples"):
        import_text(notes, LABELS, export_text(other, LABELS, "json"), "json")
    copied.set_sample(sample)
    copied.save(label("bob", "L0N0", NEWS), label("ann", "L0N0"))
    assert import_text(notes, LABELS, export_text(copied, LABELS, "json", "bob"), "json") == 2
    with pytest.raises(SettingError, match="ann, who has finished"):
        import_text(notes, LABELS, export_text(copied, LABELS, "json", "ann"), "json")
    assert notes.history(LABELS)[: len(before)] == before and len(notes.history(LABELS)) == len(before) + 2
