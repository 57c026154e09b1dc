"""Killed or refused by the system at any file-system event, a command leaves nothing wrong: run again, same bytes."""

from __future__ import annotations

import hashlib
import random
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from nursery import KILL, SHORT, Nursery, Outcome, contents, places

from hub_stand_in import Hub
from memlens import files
from memlens.annotations.records import Annotations, Label, LabeledPattern
from memlens.index.reader import Index
from memlens.memory import MemoryId

# places of a usual run
SAMPLE = {
    "scan": 8, "values": 6, "patterns": 5, "experiment": 5, "report": 3, "annotate": 4, "merge": 6, "push": 4,
    "pull": 8, "roles": 3, "site": 3,
}  # fmt: skip
OF_THE_HUB = ("README.md", ".gitattributes")  # the card names the repository
REPORTED = 1000  # bytes of a message, which is a file here, too


class Sweep:
    """A verb, what it starts from, and what it ends with when nothing happens."""

    def __init__(self, verb: str, nursery: Nursery, hub: Hub, inputs: Path, work: Path) -> None:
        self.nursery, self.hub, self.work, self.verb = nursery, hub, work, verb
        self.before = work / "before"
        self.before.mkdir()
        self.continued: set[str] = set()  # digests of states of the folder from which the verb comes to the right end
        scan = ["scan", inputs / "model", "--threads", "1", "--top", "5"]
        texts = [inputs / "one.txt", inputs / "two.txt"]
        if verb == "pull":
            self.must(*scan, *texts, "-o", work / "pushed")
            self.must("values", work / "pushed", "--threads", "1")
            self.must("push", work / "pushed", "me/index")
        elif verb == "merge":
            for i in (1, 2):
                self.must(*scan, *texts, "-o", self.before / f"part{i}", "--shard", f"{i}/2")
        elif verb != "scan":
            self.must(*scan, *texts, "-o", self.before / "index")
        if verb in ("patterns", "experiment", "report", "roles", "site"):
            self.must("values", self.before / "index", "--threads", "1")
        if verb in ("experiment", "report", "roles", "site"):
            self.must("patterns", self.before / "index")
        if verb == "report":
            self.must("experiment", self.before / "index", "agreement", "rank")
        if verb == "annotate":
            self.write_labels()
        if verb == "site":  # one of fewer triggers is there already
            self.must("site", self.before / "index", "-o", self.before / "site", "--layers", "0", "--top", "1")
        self.commands: dict[str, Sequence[Any]] = {
            "scan": [*scan, *texts, "-o", "{}/index"],
            "values": ["values", "{}/index", "--threads", "1"],
            "patterns": ["patterns", "{}/index"],
            "experiment": ["experiment", "{}/index", "agreement", "refinement", "--threads", "1"],
            "report": ["report", "{}/index"],
            "roles": ["roles", "{}/index"],
            "annotate": ["annotate", "{}/index", "restore", work / "labels.json"],
            "push": ["push", "{}/index", "me/{name}"],
            "merge": ["merge", "{}/part1", "{}/part2", "-o", "{}/index"],
            "pull": ["pull", "me/index", "-o", "{}/index"],
            "site": ["site", "{}/index", "-o", "{}/site", "--layers", "0"],
        }

    def must(self, *arguments: Any) -> None:
        outcome = self.nursery.run(arguments, self.work)
        assert outcome.code == 0, outcome.err

    def start(self, name: str) -> tuple[Path, list[str]]:
        folder = shutil.copytree(self.before, self.work / name)
        self.hub.blobs.clear()  # what the Hub has need not be sent again
        return folder, [str(part).format(folder, name=name) for part in self.commands[self.verb]]

    def write_labels(self) -> None:
        """A file of labels of two people."""
        other = shutil.copytree(self.before / "index", self.work / "labelled")
        notes = Annotations(Index(other))
        for person in ("ann", "zoë"):
            pattern = LabeledPattern("ends with river " * 40, "shallow", (0, 1, 2))
            notes.save(*(Label(person, MemoryId(1, memory), (pattern,)) for memory in range(8)))
        self.must("annotate", other, "backup", self.work / "labels.json")

    def state(self, folder: Path) -> str:
        """A digest of every file and folder, by which the same command does the same; of a push, the name matters."""
        digest = hashlib.sha256((folder.name if self.verb == "push" else "").encode())
        for path in sorted(folder.rglob("*")):
            content = path.read_bytes() if path.is_file() else b""
            digest.update(repr((path.relative_to(folder).as_posix(), path.is_file(), len(content))).encode() + content)
        return digest.hexdigest()

    def result(self, folder: Path) -> dict[str, bytes]:
        """The result of the verb: files of the index, events in the file of labels, or the repository on the Hub."""
        if self.verb == "annotate":
            notes = Annotations(Index(folder / "index"))
            return {event["key"]: repr(event).encode() for event in notes.history()}
        if self.verb == "push":
            found = self.hub.at(f"me/{folder.name}", "main")
            return {} if found is None else {name: file for name, file in found[1].items() if name not in OF_THE_HUB}
        return contents(self.written(folder))

    def written(self, folder: Path) -> Path:
        return folder / ("site" if self.verb == "site" else "index")


@pytest.fixture(scope="module", params=SAMPLE)
def sweep(request: pytest.FixtureRequest, nursery: Nursery, hub: Hub, inputs: Path, tmp_path_factory: Any) -> Sweep:
    return Sweep(request.param, nursery, hub, inputs, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def undisturbed(sweep: Sweep) -> tuple[list[str], dict[str, bytes]]:
    """The verb's events, and every byte it leaves."""
    folder, command = sweep.start("undisturbed")
    outcome = sweep.nursery.run(command, folder)
    assert outcome.code == 0, outcome.err
    assert len(outcome.events) >= 4, "a verb that writes has events"
    return outcome.events, sweep.result(folder)


@pytest.mark.parametrize(
    "fault", [KILL, pytest.param("ENOSPC", marks=pytest.mark.sweep), pytest.param("EIO", marks=pytest.mark.sweep)]
)
def test_the_same_bytes_after_a_fault_at_any_event(
    sweep: Sweep, undisturbed: tuple[list[str], dict[str, bytes]], fault: str
) -> None:
    events, expected = undisturbed
    tried = places(len(events), SAMPLE[sweep.verb], seed=len(fault))
    for at in tried:
        folder, command = sweep.start(f"{fault}-{at}")
        where = f"{fault} at event {at}, {events[at]}"
        outcome = sweep.nursery.run(command, folder, at, fault)
        if fault == KILL:
            assert outcome.code == -9, where
        else:
            refused_or_done(outcome, where)
        if sweep.verb in ("annotate", "push"):  # nothing, or all of it
            assert sweep.result(folder) in ({}, expected), where
        if sweep.verb == "site" and (folder / "site" / "index.html").exists():  # its first page comes last
            assert sweep.result(folder) == expected, where
        done_again(sweep, folder, command, expected, where)
    states = len(sweep.continued)
    print(
        f"{sweep.verb}: {fault} at {len(tried)} of {len(events)} events, none wrong; {states} states continued so far"
    )


def refused_or_done(outcome: Outcome, where: str) -> None:
    assert outcome.code in (0, 2), f"{where}: {outcome.err}"
    assert "Traceback" not in outcome.err and outcome.err.count("\n") <= 3, f"{where}: {outcome.err}"


def done_again(sweep: Sweep, folder: Path, command: list[str], expected: dict[str, bytes], where: str) -> None:
    """The same command once more leaves what it leaves undisturbed; run once for every state that faults have left."""
    state = sweep.state(folder)
    if state not in sweep.continued:
        again = sweep.nursery.run(command, folder)
        assert again.code == 0, f"{where}: {again.err}"
        found = sweep.result(folder)
        assert found.keys() == expected.keys(), where
        assert [name for name in found if found[name] != expected[name]] == [], where
        sweep.continued.add(state)
    shutil.rmtree(folder)


@pytest.mark.sweep
def test_the_same_bytes_after_files_that_could_not_grow(
    sweep: Sweep, undisturbed: tuple[list[str], dict[str, bytes]]
) -> None:
    """A write beyond a limit is done in part, and refused from there on, as on a disk that becomes full."""
    sizes = {len(content) for content in contents(sweep.written(sweep.work / "undisturbed")).values()}
    limits = sorted({limit for size in sizes for limit in (size // 2, size - 1) if limit > REPORTED})
    tried = [limits[place] for place in places(len(limits), SAMPLE[sweep.verb], seed=5)]
    refused = 0
    for limit in tried:
        folder, command = sweep.start(f"{SHORT}-{limit}")
        outcome = sweep.nursery.run(command, folder, limit, SHORT)
        refused_or_done(outcome, where := f"files of {limit} bytes at most")
        refused += outcome.code == 2
        done_again(sweep, folder, command, undisturbed[1], where)
    print(f"{sweep.verb}: {len(tried)} limits of the size of files, {refused} refused, none wrong")


MOMENTS, SAMPLED_MOMENTS = 100, 5


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_at_any_moment_is_one_line_and_the_same_bytes_after(
    sweep: Sweep, undisturbed: tuple[list[str], dict[str, bytes]], name: str
) -> None:
    began = time.monotonic()
    folder, command = sweep.start(f"{name}-timed")
    assert sweep.nursery.run(command, folder).code == 0
    takes = time.monotonic() - began

    def is_stopped(number: int, delay: float) -> bool:
        folder, command = sweep.start(f"{name}-{number}-{delay}")
        where = f"{name} after {delay:.3f} s"
        outcome = sweep.nursery.run(command, folder, fault=name, delay=delay)
        assert outcome.code in (0, 128 + signal.Signals[name], -signal.Signals[name]), f"{where}: {outcome.err}"
        if outcome.code > 0:
            messages = [line for line in outcome.err.splitlines() if line.startswith("memlens: ")]
            assert "Traceback" not in outcome.err and len(messages) == 1, f"{where}: {outcome.err}"
        done_again(sweep, folder, command, undisturbed[1], where)
        return outcome.code > 0

    tried = places(MOMENTS, SAMPLED_MOMENTS, seed=7)
    stopped = sum(is_stopped(number, takes * random.Random(number).random()) for number in tried)
    while not stopped and takes > 0.01:  # on a busy machine the first run may have taken far longer than the others
        takes /= 2
        stopped += is_stopped(MOMENTS, takes)
    print(f"{sweep.verb}: {name} at {len(tried)} moments, {stopped} of them before its end, none wrong")
    assert stopped


def test_nothing_is_renamed_before_it_is_synced(undisturbed: tuple[list[str], dict[str, bytes]]) -> None:
    """Power may go at any moment: a name must never stand for bytes that are not on the disk yet."""
    synced: set[str] = set()
    for event in undisturbed[0]:
        kind, _, path = event.partition(" ")
        if kind == "fsync":
            synced.add(path)
        elif kind == "write":
            synced.discard(path)
        elif kind in ("replace", "rename") and not path.startswith("index/partial/"):
            assert path in synced, f"{path} was renamed before it was synced"


def test_the_folder_of_a_replaced_file_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync_folder", synced.append)
    files.write_json(tmp_path / "manifest.json", {})
    assert synced == [tmp_path]
