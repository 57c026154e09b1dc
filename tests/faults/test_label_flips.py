"""One flipped bit of annotations.sqlite: the same labels or one clear line; recover loses a damaged event only."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from nursery import Nursery, Outcome, places

from index_by_hand import write_index
from memlens.annotations.answers import Label, LabelledPattern, LastLayerChange, Sample, Verdict
from memlens.annotations.store import Annotations
from memlens.index.reader import Index
from memlens.memory import MemoryId

FLIPS, SAMPLE = 300, 25
FILE = "annotations.sqlite"


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """Forty-odd events of three people, one of them over several pages of the file."""
    spots = [(sentence, 1) for sentence in range(8)]
    index = write_index(
        tmp_path_factory.mktemp("labelled") / "index",
        [f"the press of day {n} was free" for n in range(8)],
        {(layer, memory): spots for layer in range(2) for memory in range(6)},
    )
    change = LastLayerChange(1, "the press of", 3, " day", 4, " free")
    with Annotations(index) as notes:
        notes.set_sample(Sample((MemoryId(0, 0), MemoryId(1, 0)), 25, 0))
        for person in ("ann", "bob", "zoë"):
            for memory in range(6):
                text = "ends with press " * (600 if memory == 3 else 9)
                pattern = LabelledPattern(text.strip(), "shallow", (0, 1, 2))
                notes.save(*(Label(person, MemoryId(layer, memory), (pattern,)) for layer in range(2)))
            notes.undo("labels", person, "L0N2")
            notes.save(Verdict(person, change, "related"))
        notes.finish("ann")
    return index


def one_line(outcome: Outcome, where: str) -> None:
    lines = [line for line in outcome.err.splitlines() if line.strip()]
    assert outcome.code == 2 and len(lines) == 1 and "Traceback" not in outcome.err, f"{where}: {outcome}"


def events(index: Index) -> list[dict[str, Any]]:
    with Annotations(index) as notes:
        return notes.history()


def test_a_flipped_bit_never_changes_a_label_and_costs_one_event_at_most(
    labelled: Index, nursery: Nursery, tmp_path: Path
) -> None:
    folder = shutil.copytree(labelled.folder, tmp_path / "index")
    index, whole, content = Index(folder), events(labelled), (labelled.folder / FILE).read_bytes()
    reads = (("status", "--json"), ("export",), ("export", "--annotator", "bob"), ("verdicts", "export"))
    expected = {read: nursery.run(["annotate", folder, *read], tmp_path) for read in reads}
    assert all(outcome.code == 0 and outcome.out for outcome in expected.values())
    refused, lost, numbers = 0, 0, places(FLIPS, SAMPLE, seed=3)
    for number in numbers:
        draw = random.Random(number)
        end = 2 * 4096 if number % 3 == 0 else len(content)  # header and schema as often as a third of all
        place, bit = draw.randrange(end), draw.randrange(8)
        flipped = bytearray(content)
        flipped[place] ^= 1 << bit
        (folder / FILE).write_bytes(flipped)
        where = f"bit {bit} of byte {place}"
        chosen = draw.sample(reads, 2)
        doing = (*chosen, ("label", "--annotator", "eve", "--memory", "L0N0"), ("recover", "--json"), ("status",))
        *read_them, label, recovered, status = nursery.steps(*(["memlens", "annotate", folder, *one] for one in doing))
        for read, outcome in zip(chosen, read_them, strict=True):
            if (outcome.code, outcome.out) != (0, expected[read].out):
                one_line(outcome, f"{where}, {read}")
                refused += 1
        written = label.code == 0
        if not written:
            one_line(label, f"{where}, label")
        assert recovered.code == 0 and status.code == 0, f"{where}: {recovered} {status}"
        done, found = json.loads(recovered.out), events(index)
        lost += len(done["lost"])
        kept = [event for event in found if event["annotator"] != "eve"]
        keys = {event["key"] for event in kept}
        assert kept == [event for event in whole if event["key"] in keys], where
        assert len(done["lost"]) == len(whole) - len(kept) <= 1, f"{where}: {done}"
        assert len(found) - len(kept) == written and not (written and done["lost"]), where
        for path in folder.glob(f"{FILE}*"):
            path.unlink()
    print(
        f"labels: {len(numbers)} flips, {refused} of {2 * len(numbers)} reads refused, {lost} events lost, none wrong"
    )
