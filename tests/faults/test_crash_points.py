"""Killed or refused by the system at any file-system event, a command leaves nothing wrong: run again, same bytes."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from nursery import KILL, Nursery, contents, places

VERBS = ("scan", "values", "patterns", "experiment", "report", "merge", "pull")
SAMPLE = {"scan": 8, "values": 6, "patterns": 5, "experiment": 5, "report": 3, "merge": 6, "pull": 8}


class Sweep:
    """A verb, what it starts from, and what it ends with when nothing happens."""

    def __init__(self, verb: str, nursery: Nursery, inputs: Path, work: Path) -> None:
        self.nursery, self.work, self.verb = nursery, work, verb
        self.before = work / "before"
        self.before.mkdir()
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
        if verb in ("patterns", "experiment", "report"):
            self.must("values", self.before / "index", "--threads", "1")
        if verb in ("experiment", "report"):
            self.must("patterns", self.before / "index")
        if verb == "report":
            self.must("experiment", self.before / "index", "agreement", "rank")
        self.commands: dict[str, Sequence[Any]] = {
            "scan": [*scan, *texts, "-o", "{}/index"],
            "values": ["values", "{}/index", "--threads", "1"],
            "patterns": ["patterns", "{}/index"],
            "experiment": ["experiment", "{}/index", "agreement", "refinement", "--threads", "1"],
            "report": ["report", "{}/index"],
            "merge": ["merge", "{}/part1", "{}/part2", "-o", "{}/index"],
            "pull": ["pull", "me/index", "-o", "{}/index"],
        }

    def must(self, *arguments: Any) -> None:
        outcome = self.nursery.run(arguments, self.work)
        assert outcome.code == 0, outcome.err

    def start(self, name: str) -> tuple[Path, list[str]]:
        folder = shutil.copytree(self.before, self.work / name)
        return folder, [str(part).format(folder) for part in self.commands[self.verb]]


@pytest.fixture(scope="module", params=VERBS)
def sweep(request: pytest.FixtureRequest, nursery: Nursery, inputs: Path, tmp_path_factory: Any) -> Sweep:
    return Sweep(request.param, nursery, inputs, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def undisturbed(sweep: Sweep) -> tuple[list[str], dict[str, bytes]]:
    """The verb's events, and every byte it leaves."""
    folder, command = sweep.start("undisturbed")
    outcome = sweep.nursery.run(command, folder)
    assert outcome.code == 0, outcome.err
    assert len(outcome.events) >= 4, "a verb that writes has events"
    return outcome.events, contents(folder / "index")


@pytest.mark.parametrize("fault", [KILL, "ENOSPC", "EIO"])
def test_the_same_bytes_after_a_fault_at_any_event(
    sweep: Sweep, undisturbed: tuple[list[str], dict[str, bytes]], fault: str
) -> None:
    events, expected = undisturbed
    for at in places(len(events), SAMPLE[sweep.verb], seed=len(fault)):
        folder, command = sweep.start(f"{fault}-{at}")
        where = f"{fault} at event {at}, {events[at]}"
        outcome = sweep.nursery.run(command, folder, at, fault)
        if fault == KILL:
            assert outcome.code == -9, where
        else:
            assert outcome.code in (0, 2), f"{where}: {outcome.err}"
            assert "Traceback" not in outcome.err and outcome.err.count("\n") <= 3, f"{where}: {outcome.err}"
        again = sweep.nursery.run(command, folder)
        assert again.code == 0, f"{where}: {again.err}"
        found = contents(folder / "index")
        assert found.keys() == expected.keys(), where
        assert [name for name in found if found[name] != expected[name]] == [], where
        shutil.rmtree(folder)


MOMENTS, SAMPLED_MOMENTS = 100, 5


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_at_any_moment_is_one_line_and_the_same_bytes_after(
    sweep: Sweep, undisturbed: tuple[list[str], dict[str, bytes]], name: str
) -> None:
    began = time.monotonic()
    folder, command = sweep.start(f"{name}-timed")
    assert sweep.nursery.run(command, folder).code == 0
    takes = time.monotonic() - began
    stopped = 0
    for number in places(MOMENTS, SAMPLED_MOMENTS, seed=7):
        folder, command = sweep.start(f"{name}-{number}")
        where = f"{name} after {(delay := takes * random.Random(number).random()):.3f} s"
        outcome = sweep.nursery.run(command, folder, fault=name, delay=delay)
        assert outcome.code in (0, 128 + signal.Signals[name], -signal.Signals[name]), f"{where}: {outcome.err}"
        if outcome.code > 0:
            stopped += 1
            assert "Traceback" not in outcome.err and outcome.err.count("\n") <= 2, f"{where}: {outcome.err}"
        again = sweep.nursery.run(command, folder)
        assert again.code == 0, f"{where}: {again.err}"
        found = contents(folder / "index")
        assert [file for file in undisturbed[1] if found.get(file) != undisturbed[1][file]] == [], where
        shutil.rmtree(folder)
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
