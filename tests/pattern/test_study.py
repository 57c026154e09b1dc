"""The study with people: samples, exchange of files, agreement, and the machine against people."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from index_by_hand import write_index

from memlens.annotations.files import export_labels, import_labels
from memlens.annotations.labels import Annotations, LabelledPattern, Sample
from memlens.annotations.study import agreement, cohens_kappa, compare_with_people, draw_sample
from memlens.cli.annotate import read_export
from memlens.errors import MemlensError, SettingError
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.pattern.table import PATTERNS_SCHEMA

TEXTS = [f"the press of day {n} was free" for n in range(8)]
PRESS = LabelledPattern('ends with "press"', "shallow", (0, 1, 2, 3))
NEWS = LabelledPattern('about, say, "news"\nand more', "semantic", (2, 3, 4))


@pytest.fixture
def index(tmp_path: Path) -> Index:
    places = [(s, 1) for s in range(8)]
    memories = {(layer, memory): places for layer in range(2) for memory in range(6)}
    return write_index(tmp_path / "index", TEXTS, memories | {(1, 6): []})


def label(index: Index) -> None:
    """Two people, four memories: they agree on the class of three."""
    with Annotations(index) as notes:
        for name, patterns in {
            "ann": ([PRESS], [NEWS], [], [PRESS, NEWS]),
            "bob": ([LabelledPattern("press", "shallow", (0, 1, 2, 5))], [NEWS], [], [PRESS]),
        }.items():
            for memory, own in enumerate(patterns):
                notes.save(name, f"L0N{memory}", own)
            notes.finish(name)


def test_a_sample_has_as_many_live_memories_of_each_layer(index: Index) -> None:
    sample = draw_sample(index, per_layer=4, seed=3)
    assert [memory.layer for memory in sample.memories] == [0] * 4 + [1] * 4
    assert len(set(sample.memories)) == 8 and sample == draw_sample(index, per_layer=4, seed=3)
    assert sample != draw_sample(index, per_layer=4, seed=4)
    assert len(draw_sample(index, per_layer=50).memories) == 12  # the dead memory is left out


def test_kappa_is_one_for_equal_and_about_zero_for_unrelated_labels() -> None:
    assert cohens_kappa([("a", "a"), ("b", "b")]) == 1
    assert cohens_kappa([("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")]) == 0
    assert cohens_kappa([("a", "a")]) is None and cohens_kappa([]) is None
    # worked by hand: 20 yes-yes, 5 yes-no, 10 no-yes, 15 no-no
    pairs = [("y", "y")] * 20 + [("y", "n")] * 5 + [("n", "y")] * 10 + [("n", "n")] * 15
    assert cohens_kappa(pairs) == pytest.approx(0.4)


def test_agreement_counts_classes_and_overlaps_of_prefixes(index: Index) -> None:
    with pytest.raises(SettingError, match="two people"):
        agreement(index)
    label(index)
    (pair,) = agreement(index)
    assert (pair.one, pair.other, pair.memories, pair.same_class) == ("ann", "bob", 4, 3)
    # classes: shallow-shallow, semantic-semantic, none-none, both-shallow; by chance 1/4*2/4 + 1/4*1/4 + 1/4*1/4
    assert pair.kappa == pytest.approx((3 / 4 - 1 / 4) / (1 - 1 / 4))
    assert pair.jaccard["shallow"] == pytest.approx((3 / 5 + 1) / 2)
    assert pair.jaccard["semantic"] == pytest.approx((1 + 0) / 2)
    assert pair.jaccard["either"] == pytest.approx((3 / 5 + 1 + 4 / 5) / 3)


def test_the_machine_is_compared_with_each_person(index: Index) -> None:
    label(index)
    rows = [
        {"layer": 0, "memory": 0, "pattern": "p", "kind": "shallow", "description": "d", "prefixes": [0, 1, 7]},
        {"layer": 0, "memory": 2, "pattern": "p", "kind": "shallow", "description": "d", "prefixes": [0, 1, 2]},
        {"layer": 1, "memory": 0, "pattern": "p", "kind": "shallow", "description": "d", "prefixes": [0, 1, 2]},
    ]
    table = pa.Table.from_pylist(rows, PATTERNS_SCHEMA)
    index.write({"patterns": (PATTERNS_SCHEMA, [table])}, dict)
    found = {(row.annotator, row.kind): row for row in compare_with_people(index)}
    ann = found["ann", "shallow"]
    assert (ann.memory_precision, ann.memory_recall) == (1 / 2, 1 / 2)
    assert (ann.prefix_precision, ann.prefix_recall) == (2 / 6, 2 / 8)
    assert found["bob", "semantic"].memory_precision is None and found["bob", "semantic"].memory_recall == 0


def test_json_carries_the_whole_history_and_is_imported_once(index: Index, tmp_path: Path) -> None:
    shutil.copytree(index.folder, tmp_path / "copy")
    with Annotations(index) as notes:
        notes.save("ann", "L0N5", [PRESS])
        notes.undo("ann", "L0N5")
    label(index)
    with Annotations(index) as notes, Annotations(Index(tmp_path / "copy")) as other:
        text = export_labels(notes, "json")
        assert import_labels(other, text, "json") == len(notes.history()) == 12
        assert import_labels(other, text, "json") == 0
        assert other.labels() == notes.labels() and export_labels(other, "json") == text


def test_csv_brings_the_same_labels_back(index: Index, tmp_path: Path) -> None:
    shutil.copytree(index.folder, tmp_path / "copy")
    label(index)
    with Annotations(index) as notes, Annotations(Index(tmp_path / "copy")) as other:
        text = export_labels(notes, "csv")
        assert import_labels(other, text, "csv") == 8
        assert export_labels(other, "csv", "ann") == export_labels(notes, "csv", "ann")
        assert other.labels_of("ann") == notes.labels_of("ann")


@pytest.mark.parametrize(
    ("text", "format"),
    [("{", "json"), ("[]", "json"), ('{"events": [{}], "model": null}', "json"), ("a,b\n1,2\n", "csv"),
     ("annotator,memory,kind,description,prefixes\nann,L0N0,shallow,x,0 1\n", "csv"),
     ("annotator,memory,kind,description,prefixes\nann,L0N0,deep,x,0 1 2\n", "csv"),
     ("annotator,memory,kind,description,prefixes\nann,L0N0,shallow,x,0 1 2\nann,L9N0,shallow,x,0 1 2\n", "csv"),
     ("annotator,memory,kind,description,prefixes\nann,L0N0,shallow,x,0 one 2\n", "csv"),
     ("annotator,memory,kind,description,prefixes\nann,L0N0,,,0 1 2\n", "csv"),
     (f"annotator,memory,kind,description,prefixes\nann,L0N0,shallow,{'x' * 200_000},0 1 2\n", "csv"),
     ("[" * 100_000, "json"), ("", "xml")],
)  # fmt: skip
def test_a_wrong_file_is_refused_as_a_whole(index: Index, text: str, format: str) -> None:
    with Annotations(index) as notes:
        with pytest.raises(MemlensError) as refused:
            import_labels(notes, text, format)
        assert "\n" not in str(refused.value)
        assert notes.history() == []


def test_an_export_keeps_quiet_about_people_who_have_not_finished(index: Index) -> None:
    with Annotations(index) as notes:
        notes.save("ann", "L0N0", [PRESS])
        for format in ("json", "csv"):
            assert "press" not in export_labels(notes, format)
            assert "press" in export_labels(notes, format, "ann")
        notes.finish("ann")
        assert "press" in export_labels(notes, "csv")


def changed(event: int, **columns: Any) -> Callable[[dict[str, Any]], None]:
    return lambda file: file["events"][event].update(columns)


def with_pattern(**fields: Any) -> Callable[[dict[str, Any]], None]:
    pattern = {"description": "x", "kind": "shallow", "prefixes": [0, 1, 2]}
    return changed(1, content={"patterns": [pattern | fields]})


UNREADABLE = [
    changed(0, content={"memories": "L0N0", "top": 25, "seed": 0}),
    changed(0, content={"memories": ["L0N0"], "top": "25", "seed": 0}),
    changed(0, content={"memories": ["L0N99"], "top": 25, "seed": 0}),
    changed(0, annotator="\ud800"),
    changed(1, key="\ud800"),
    changed(1, annotator=""),
    changed(1, annotator="a\nb"),
    changed(1, annotator="\ud800"),
    changed(1, layer=0.5),
    changed(1, layer=float("inf")),
    with_pattern(description=5),
    with_pattern(description="\ud800"),
    with_pattern(prefixes=["0", "1", "2"]),
    with_pattern(prefixes=[0.5, 1.5, 2.5]),
    changed(2, content={"undoes": ["a", "list"]}),
    lambda file: file.update(corpus="another"),
]


@pytest.mark.parametrize("spoil", UNREADABLE)
def test_an_event_that_could_not_be_read_again_never_enters_the_history(
    index: Index, tmp_path: Path, spoil: Callable[[dict[str, Any]], None]
) -> None:
    shutil.copytree(index.folder, tmp_path / "copy")
    with Annotations(index) as notes, Annotations(Index(tmp_path / "copy")) as other:
        notes.set_sample(Sample((MemoryId(0, 0),), 25, 0))
        notes.save("ann", "L0N0", [PRESS])
        notes.undo("ann", "L0N0")
        file = json.loads(export_labels(notes, "json", "ann"))
        spoil(file)
        with pytest.raises(MemlensError) as refused:
            import_labels(other, json.dumps(file), "json")
        assert "\n" not in str(refused.value) and other.history() == []


def test_an_import_neither_changes_the_sample_of_labels_nor_what_a_finished_person_said(
    index: Index, tmp_path: Path
) -> None:
    for name in ("other", "late"):
        shutil.copytree(index.folder, tmp_path / name)
    sample = Sample((MemoryId(0, 0),), 25, 0)
    with Annotations(index) as notes:
        notes.set_sample(sample)
        notes.save("ann", "L0N0", [PRESS])
        notes.finish("ann")
        before = notes.history()
        with Annotations(Index(tmp_path / "other")) as other:
            other.set_sample(Sample((MemoryId(0, 1),), 25, 1))
            other.save("bob", "L0N1", [NEWS])
            with pytest.raises(SettingError, match="another sample"):
                import_labels(notes, export_labels(other, "json", "bob"), "json")
        with Annotations(Index(tmp_path / "late")) as late:
            late.set_sample(sample)
            late.save("bob", "L0N0", [NEWS])
            assert import_labels(notes, export_labels(late, "json", "bob"), "json") == 2
            late.save("ann", "L0N0", [])
            with pytest.raises(SettingError, match="ann has finished"):
                import_labels(notes, export_labels(late, "json", "ann"), "json")
        assert notes.history()[: len(before)] == before and len(notes.history()) == len(before) + 2


@pytest.mark.parametrize("description", ["a\rb", "a\r\nb", 'c, "d";\t', "\u2028 عربى 🙂", "'"])
def test_csv_carries_every_sign_of_a_description(index: Index, tmp_path: Path, description: str) -> None:
    shutil.copytree(index.folder, tmp_path / "copy")
    with Annotations(index) as notes, Annotations(Index(tmp_path / "copy")) as other:
        notes.save("ann", "L0N0", [LabelledPattern(description, "semantic", (0, 1, 2))])
        import_labels(other, export_labels(notes, "csv", "ann"), "csv")
        assert other.labels_of("ann") == notes.labels_of("ann")


def test_a_file_that_a_spreadsheet_has_saved_is_read(index: Index, tmp_path: Path) -> None:
    file = tmp_path / "labels.csv"
    file.write_text("annotator,memory,kind,description,prefixes\nann,L0N0,shallow,x,0 1 2\n", "utf-8-sig")
    with Annotations(index) as notes:
        assert import_labels(notes, read_export(str(file)), "csv") == 1
