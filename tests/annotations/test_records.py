"""Labels and verdicts: the last answer counts, the protocol holds, and unknown events change nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from people import DAY, NEWS, PRESS, answers, first_answer, label, second_answer

import memlens
from index_by_hand import write_index
from memlens.annotations.files import backup_text, import_text, restore_text
from memlens.annotations.log import AnnotationLog, Event
from memlens.annotations.records import LABELS, VERDICTS, Annotations, LabeledPattern, Sample, Verdict
from memlens.annotations.study import read_person, read_study
from memlens.errors import IndexFolderError, MemlensError, SettingError, UnknownName
from memlens.index.format import SCAN_TABLES
from memlens.index.reader import Index
from memlens.index.staging import replace_tables
from memlens.memory import MemoryId

Run = Callable[..., tuple[int, str, str]]
both_tasks = pytest.mark.parametrize("task", [LABELS, VERDICTS])


@both_tasks
def test_the_last_answer_counts_and_undo_brings_back_the_one_before(index: Index, task: str) -> None:
    first, second = first_answer(task, "ann"), second_answer(task, "ann")
    notes = Annotations(index)
    notes.save(first)
    notes.save(second)
    assert answers(notes, task, "ann") == [second]
    assert notes.undo(task, "ann", first.subject) == first and answers(notes, task, "ann") == [first]
    assert notes.undo(task, "ann", first.subject) is None and answers(notes, task, "ann") == []
    with pytest.raises(SettingError, match=f"no {task[:-1]} o[fn] .*{first.subject}"):
        notes.undo(task, "ann", first.subject)
    assert [event["kind"] for event in notes.history(task)] == [first.kind, first.kind, "undo", "undo"]
    with pytest.raises(UnknownName):
        notes.save(first_answer(task, " "))
    assert len(notes.history(task)) == 4


def test_nobody_sees_others_before_finishing_and_nobody_changes_after(index: Index) -> None:
    notes = Annotations(index)
    notes.set_sample(Sample((MemoryId(0, 0),), 25, 0))
    notes.save(label("ann", "L0N0", PRESS), label("bob", "L0N0", NEWS))
    assert {one.annotator for one in notes.labels("bob")} == {"bob"}
    assert notes.labels() == []
    notes.finish("ann")
    assert {one.annotator for one in notes.labels("bob")} == {"bob"}
    assert {one.annotator for one in notes.labels("ann")} == {"ann"}  # bob is not done
    notes.finish("bob")
    assert {one.annotator for one in notes.labels("ann")} == {"ann", "bob"}
    for change in (lambda: notes.save(label("ann", "L0N0")), lambda: notes.undo(LABELS, "ann", "L0N0")):
        with pytest.raises(SettingError, match="has finished"):
            change()
    notes.save(Verdict("ann", DAY, "related"))  # another task


def test_finishing_needs_every_memory_of_the_sample(index: Index) -> None:
    notes = Annotations(index)
    notes.set_sample(Sample((MemoryId(0, 0), MemoryId(1, 0)), 25, 0))
    notes.save(label("ann", "L0N0", PRESS))
    with pytest.raises(SettingError, match="L1N0"):
        notes.finish("ann")
    notes.save(label("ann", "L1N0"))
    notes.finish("ann")
    with pytest.raises(SettingError, match="already contains labels"):
        notes.set_sample(Sample((MemoryId(0, 1),), 25, 1))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (label("ann", "L0N0", LabeledPattern(" ", "shallow", (0, 1, 2))), "no description"),
        (label("ann", "L0N0", LabeledPattern("x", "deep", (0, 1, 2))), "not a class"),
        (label("ann", "L0N0", LabeledPattern("x", "shallow", (0, 1, 1))), "fewer than 3"),
        (label("ann", "L0N0", LabeledPattern("x", "shallow", (0, 1, 8))), "are 0 to 7"),
        (label("ann", "L9N0", PRESS), "layer 9"),
        (Verdict("ann", DAY, "near"), "not a verdict"),
    ],
)
def test_an_answer_that_is_none_is_refused(index: Index, answer: Verdict, words: str) -> None:
    notes = Annotations(index)
    with pytest.raises(MemlensError, match=words):
        notes.save(first_answer(answer.task, "ann"), answer)
    assert notes.history(answer.task) == []


def test_a_label_outside_the_sample_is_refused_and_does_not_count(index: Index) -> None:
    notes = Annotations(index)
    notes.save(label("ann", "L0N3", PRESS))
    exported = [Event(**event) for event in notes.history()]
    notes.path.unlink()
    notes.set_sample(Sample((MemoryId(0, 0), MemoryId(1, 0)), 25, 0))
    with pytest.raises(SettingError, match="L0N3 is not one of the"):
        notes.save(label("ann", "L0N3", PRESS))
    notes.append_events(exported)  # of a copy that had no sample
    notes.save(label("ann", "L0N0", PRESS))
    (progress,) = read_study(notes).people
    assert (progress.labeled, progress.sample) == (1, 2)
    assert read_person(notes, "ann").done == (MemoryId(0, 0),)


def replay_slowly(events: list[dict[str, Any]]) -> dict[tuple[str, str, str], str]:
    """Return {(task, annotator, subject): key of the current answer}: look at all later events for each one."""
    current = {}
    for event in events:
        undone = [e for e in events if e["kind"] == "undo" and e["content"]["undoes"] == event["key"]]
        if event["kind"] in ("label", "verdict") and not undone:
            current[event["task"], event["annotator"], event["subject"]] = event["key"]
    return current


@pytest.mark.parametrize("seed", range(5))
def test_the_current_answers_are_those_of_a_slow_replay(index: Index, seed: int) -> None:
    random, notes = Random(seed), Annotations(index)
    for number in range(60):
        task, annotator = random.choice([LABELS, VERDICTS]), random.choice(["ann", "bob"])
        subject = random.choice(["L0N0", "L1N0"]) if task == LABELS else DAY.name
        if random.random() < 0.4:
            with suppress(SettingError):  # there is nothing to undo
                notes.undo(task, annotator, subject)
        elif task == LABELS:
            notes.save(label(annotator, subject, LabeledPattern(str(number), "shallow", (0, 1, 2))))
        else:
            notes.save(Verdict(annotator, DAY, random.choice(["related", "distant"])))
    contents = {event["key"]: event["content"] for event in notes.history()}
    expected = {where: contents[key] for where, key in replay_slowly(notes.history()).items()}
    fresh = Annotations(index)
    labels = [label for person in ("ann", "bob") for label in fresh.labels_of(person)]
    assert {(a.task, a.annotator, a.subject): a.content for a in [*labels, *fresh.verdicts()]} == expected


def test_events_of_a_newer_version_are_reported_and_kept(index: Index) -> None:
    notes = Annotations(index)
    notes.save(label("ann", "L0N0", PRESS))
    newer = [
        Event("1", "2030", "praise", "medal", "ann", "", {}),
        Event("2", "2030", LABELS, "rating", "ann", "L0N0", {"stars": 5}),
        Event("3", "2030", LABELS, "label", "ann", "L0N0", {"drawing": "…"}),
    ]
    with notes.path.open("ab") as file:
        file.writelines(event.to_line() for event in newer)
    notes.save(label("bob", "L0N0", PRESS))
    assert notes.labels_of("ann") == [label("ann", "L0N0", PRESS)] and notes.list_annotators() == ["ann", "bob"]
    (problem,) = notes.list_problems()
    assert "'labels/label', 1 of kind 'labels/rating', 1 of kind 'praise/medal'" in problem
    (finding,) = [finding for finding in memlens.check(index.folder).findings if finding.file == "annotations.jsonl"]
    assert finding.state == "whole" and finding.detail == f"5 events; {problem}"


@pytest.mark.parametrize(
    "content",
    [
        {"memories": "L0N0"},
        {"memories": ["L0"], "top": 1, "seed": 0},
        {"undoes": ["a"]},
        {"patterns": [{"kind": 5}]},
        {},
    ],
)
@pytest.mark.parametrize("kind", ["sample", "label", "undo", "finish"])
def test_content_of_another_form_does_not_stop_the_replay(index: Index, kind: str, content: dict[str, Any]) -> None:
    notes = Annotations(index)
    notes.save(label("ann", "L0N0", PRESS))
    with notes.path.open("ab") as file:
        file.write(Event("1", "", LABELS, kind, "eve", "L0N0", content).to_line())
    assert notes.labels_of("ann") == [label("ann", "L0N0", PRESS)]


def test_labels_of_a_scan_never_get_into_another_one(index: Index, tmp_path: Path) -> None:
    other = write_index(tmp_path / "other", ["the press was free"], {(0, 0): [(0, 1)]})
    notes = Annotations(index)
    shutil.copy(other.folder / "manifest.json", index.folder)
    with pytest.raises(IndexFolderError):
        notes.save(label("ann", "L1N0"))
    assert not notes.path.exists()


def test_a_scan_does_not_replace_an_index_while_someone_annotates_it(index: Index) -> None:
    log = AnnotationLog(index.folder / "annotations.jsonl")
    with log.appending(), pytest.raises(IndexFolderError, match="is being annotated"):
        replace_tables(index.folder, index.folder, SCAN_TABLES)
    assert Index(index.folder).manifest


@pytest.mark.parametrize(
    "options",
    [
        ("undo", "--annotator", "ann", "--memory", "L0N0"),
        ("finish", "--annotator", "ann"),
        ("sample", "--per-layer", "0"),
        ("label", "--annotator", "ann", "--memory", "L9N0"),
        ("import", "--file", "nowhere.json"),
        ("recover",),
    ],
)
def test_a_refused_command_creates_no_log(index: Index, refused: Callable[..., str], options: tuple[str, ...]) -> None:
    assert refused("annotate", index.folder, *options)
    assert not (index.folder / "annotations.jsonl").exists()


def test_a_backup_holds_everything_and_restore_brings_it_back(index: Index, copy: Index) -> None:
    notes, other = Annotations(index), Annotations(copy)
    notes.set_sample(Sample((MemoryId(0, 0),), 25, 0))
    notes.save(label("ann", "L0N0", PRESS), label("bob", "L0N0", NEWS), Verdict("ann", DAY, "related"))
    notes.undo(VERDICTS, "ann", DAY.name)
    notes.finish("ann")
    text = backup_text(notes)
    assert restore_text(other, text) == 6 and restore_text(other, text) == 0
    assert other.history() == notes.history()
    assert [other.mark(task) for task in (LABELS, VERDICTS)] == [notes.mark(task) for task in (LABELS, VERDICTS)]
    with pytest.raises(SettingError, match="restore"):
        import_text(other, LABELS, text, "json")
    damaged = json.loads(text)
    damaged["events"][5]["task"] = "praise"
    with pytest.raises(SettingError, match="event 5"):
        restore_text(other, json.dumps(damaged))


def test_an_export_replaces_nothing_but_an_export(index: Index, tmp_path: Path, run: Run) -> None:
    Annotations(index).save(label("ann", "L0N0", PRESS))
    for name, words in (
        ("a.json", ("export", "--file")),
        ("v.csv", ("verdicts", "export", "--file")),
        ("b", ("backup",)),
    ):
        for _ in range(2):
            assert run("annotate", index.folder, *words, tmp_path / name)[0] == 0
    mine, link = tmp_path / "mine.json", tmp_path / "link.json"
    mine.write_text('{"my": "work"}')
    link.symlink_to(tmp_path / "a.json")
    for target in (mine, link, index.folder / "new.json", index.folder / "annotations.jsonl", tmp_path):
        for words in (("export", "--file"), ("verdicts", "export", "--file"), ("backup",)):
            assert run("annotate", index.folder, *words, target)[0] == 2
    assert mine.read_text() == '{"my": "work"}' and link.is_symlink()
    assert run("annotate", index.folder, "export", "--file", mine, "--force")[0] == 0
    assert "memlens_annotations" in mine.read_text()
