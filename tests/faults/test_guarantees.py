"""The guarantees of docs/security.md under faults: no wrong answer, no lost event, no traceback, no orphan process.

Every fault is drawn by a seed: a bit of a file, or the number of an event of a command (see nursery.py). Each test runs
a few of them by default and all as a sweep, and prints how many it tried.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from nursery import SHORT, Nursery, Outcome

from hub_stand_in import Hub, running
from memlens.annotations.records import Annotations, Label, LabeledPattern
from memlens.index.check import check_index
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.testing import save_tiny

TEXT = (
    "The river runs to the sea. The river runs to the hills. The press was free in the city of Paris.\n"
    "Rain fell on the hills, and the rivers rose. In 1990 a small house opened near the river.\n"
    "The end of the war came in the spring, as the papers of the day had said. The city was free.\n"
)
SCAN = "scan {inputs}/model {inputs}/one.txt {inputs}/two.txt --threads 1 --top 5 -o"


CARD = ("README.md", ".gitattributes")  # files of a repository that are not files of the index


class Step(NamedTuple):
    """A command, the step whose result it starts from, and what it writes."""

    command: str
    after: str = ""
    output: str = "index"


STEPS = {
    "scan": Step(f"{SCAN} {{}}/index"),
    "scan with workers": Step(f"{SCAN} {{}}/index --workers 2"),
    "values": Step("values {}/index --threads 1", "scan"),
    "patterns": Step("patterns {}/index", "values"),
    "roles": Step("roles {}/index", "patterns"),
    "experiment": Step("experiment {}/index agreement refinement --threads 1", "roles"),
    "report": Step("report {}/index", "experiment"),
    "annotate": Step("annotate {}/index restore {inputs}/labels.json", "experiment"),
    "shard": Step(f"{SCAN} {{}}/part1 --shard 1/2", output="part1"),
    "second shard": Step(f"{SCAN} {{}}/part2 --shard 2/2", "shard", "part2"),
    "merge": Step("merge {}/part1 {}/part2 -o {}/index", "second shard"),
    "site": Step("site {}/index -o {}/site --layers 0", "experiment", "site"),
    "push": Step("push {}/index me/{name}", "experiment"),
    "pull": Step("pull me/push-clean -o {}/index"),
}
READERS = (
    "show {}/index L1N3 --json", "search {}/index river --json", "search {}/index in --in values --json",
    "search {}/index ends --in patterns --json", "export {}/index --format jsonl", "compare {}/index {}/index --json",
    "experiment {}/index agreement --json", "report {}/index -o {}/page.html", "roles {}/index --json",
    "annotate {}/index status --json",
)  # fmt: skip
ADDRESSES = (
    "/api/counts", "/api/layers", "/api/memories/L1N3", "/api/search?q=river", "/api/map", "/m/L1N3",
    'POST:/api/annotate/labels:{{"annotator":"ann","memory":"L2N3","patterns":[]}}', "/api/annotate",
    "/api/memories/L0N2", "/api/compare?by=triggers&layers=0:1",
)  # fmt: skip


class Clean(NamedTuple):
    """What a step does without a fault."""

    folder: Path
    outcome: Outcome
    result: dict[str, bytes]


class Room:
    """Runs steps and readers in copies of folders. `{}` in a command stands for the folder."""

    def __init__(self, nursery: Nursery, hub: Hub, inputs: Path, work: Path) -> None:
        self.nursery, self.hub, self.inputs, self.work = nursery, hub, inputs, work
        self.clean = cache(self._clean)

    def run(self, command: str, folder: Path, **fault: object) -> Outcome:
        words = (word.format(folder, inputs=self.inputs, name=folder.name) for word in command.split(" "))
        outcome = self.nursery.run(list(words), folder, **fault)
        assert outcome.lingering < 5, f"{command}: a process lived for {outcome.lingering:.1f} s longer"
        return outcome

    def start(self, step: str, name: str) -> Path:
        """Return a new folder with what a step starts from."""
        folder = self.work / name
        shutil.rmtree(folder, ignore_errors=True)
        if after := STEPS[step].after:
            shutil.copytree(self.clean(after).folder, folder)
        else:
            folder.mkdir()
        self.hub.blobs.clear()  # files that the Hub has are not sent again
        return folder

    def _clean(self, step: str, counts: str = "writes") -> Clean:
        if step == "pull":
            self.clean("push")
        folder = self.start(step, f"{step}-clean" if counts == "writes" else f"{step}-{counts}")
        outcome = self.run(STEPS[step].command, folder, counts=counts)
        assert outcome.code == 0, outcome.err
        return Clean(folder, outcome, self.result(step, folder))

    def result(self, step: str, folder: Path) -> dict[str, bytes]:
        """Return what a step wrote: files, events of annotations, or files on the Hub but its card."""
        if step == "annotate":
            return {event["key"]: repr(event).encode() for event in Annotations(Index(folder / "index")).history()}
        if step == "push":
            found = self.hub.at(f"me/{folder.name}", "main")
            return {} if found is None else {name: found[1][name] for name in found[1] if name not in CARD}
        return contents(folder / STEPS[step].output)

    def resume(self, step: str, folder: Path, where: str) -> None:
        """Run a step again. It must leave what it leaves without a fault."""
        again = self.run(STEPS[step].command, folder)
        assert again.code == 0, f"{where}: {again.err}"
        found, expected = self.result(step, folder), self.clean(step).result
        assert {name for name in {*found, *expected} if found.get(name) != expected.get(name)} == set(), where
        shutil.rmtree(folder)


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files but locks, and empty folders, whose names end in a slash."""
    paths = [path for path in sorted(folder.rglob("*")) if not path.name.endswith("lock")]
    empty = {f"{path.relative_to(folder)}/": b"" for path in paths if path.is_dir() and not any(path.iterdir())}
    return empty | {str(path.relative_to(folder)): path.read_bytes() for path in paths if path.is_file()}


def check_refusal(outcome: Outcome, where: str) -> None:
    """A command that fails does so with exit code 2 and one line; a note may come before it."""
    lines = outcome.err.splitlines()
    assert outcome.code == 2 and "Traceback" not in outcome.err, f"{where}: {outcome.code} {outcome.err}"
    assert 1 <= len(lines) <= 2 and lines[-1].startswith("memlens: "), f"{where}: {outcome.err}"


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    inputs = tmp_path_factory.mktemp("inputs")
    save_tiny(inputs / "model", "llama")
    (inputs / "one.txt").write_text(TEXT)
    (inputs / "two.txt").write_text(TEXT.replace("river", "road"))
    warm = tmp_path_factory.mktemp("warm")
    with running() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.address)
        patch.setenv("HF_TOKEN", "hf_of_the_tests")
        patch.setenv("HF_HUB_DISABLE_XET", "1")
        chain = ("scan", "values", "patterns", "roles", "experiment", "report")
        nursery = Nursery(*(STEPS[step].command.format(warm, inputs=inputs).split(" ") for step in chain))
        room = Room(nursery, hub, inputs, tmp_path_factory.mktemp("room"))
        labeled = shutil.copytree(room.clean("scan").folder, room.work / "labeled")
        notes = Annotations(Index(labeled / "index"))
        for person in ("ann", "zoë"):
            pattern = LabeledPattern("ends with river " * 40, "shallow", (0, 1, 2))
            notes.save(*(Label(person, MemoryId(1, memory), (pattern,)) for memory in range(8)))
        assert room.run("annotate {}/index backup {inputs}/labels.json", labeled).code == 0
        yield room
        nursery.close()


def some_or(count: int, few: int) -> pytest.MarkDecorator:
    """Run a test with few faults by default and with all as a sweep."""
    return pytest.mark.parametrize("count", [few, pytest.param(count, marks=pytest.mark.sweep)])


@some_or(300, 8)
def test_a_flipped_bit_or_a_missing_file_gives_the_same_answer_or_one_line(room: Room, count: int) -> None:
    whole, folder, draw = room.clean("annotate").folder, room.work / "flipped", random.Random(1)
    names = sorted({*contents(whole)} - {"index/annotations.jsonl"})
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    expected = {command: read(room, command, folder) for command in READERS}
    assert all(outcome.code == 0 for outcome, _ in expected.values())
    refused = 0
    for number in range(count):
        name = names[number % len(names)]
        what = change_file(folder / name, draw, is_removed=number % 10 == 9)
        command = draw.choice(READERS)
        outcome, page = read(room, command, folder)
        if (outcome.code, outcome.out, page) != (0, expected[command][0].out, expected[command][1]):
            check_refusal(outcome, f"{what}, {command}")
            refused += 1
        if number % 10 == 0:  # what is damaged is not used for another table
            outcome = room.run("patterns {}/index", folder)
            found, tables = contents(folder), ("index/patterns.parquet", "index/names.parquet")
            if any(found.get(table) != (whole / table).read_bytes() for table in tables if table != name):
                raise AssertionError(f"{what}: patterns were made from it")
            if outcome.code:
                check_refusal(outcome, f"{what}, patterns")
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
    print(f"{count} flips and reads, {refused} refused, none wrong")


def read(room: Room, command: str, folder: Path) -> tuple[Outcome, bytes]:
    """Run a command that reads. Returns its outcome and the page it wrote."""
    page = folder / "page.html"
    page.unlink(missing_ok=True)
    outcome = room.run(command, folder)
    return outcome, page.read_bytes() if page.exists() else b""


def change_file(path: Path, draw: random.Random, is_removed: bool = False) -> str:
    """Flip a bit of a file, or remove it. Returns what was done."""
    if is_removed:
        path.unlink()
        return f"{path.name} removed"
    content = bytearray(path.read_bytes())
    place, bit = draw.randrange(len(content)), draw.randrange(8)
    content[place] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {place} of {path.name}"


@some_or(100, 4)
def test_a_flipped_bit_costs_at_most_one_line_of_annotations_which_is_reported(room: Room, count: int) -> None:
    whole, folder, draw = room.clean("annotate"), room.work / "flipped-lines", random.Random(2)
    shutil.copytree(whole.folder, folder, dirs_exist_ok=True)
    path, command, reported = folder / "index" / "annotations.jsonl", "annotate {}/index status --json", 0
    content, expected = path.read_bytes(), room.run(command, folder).out
    for _ in range(count):
        what = change_file(path, draw)
        missing = whole.result.keys() - room.result("annotate", folder).keys()
        outcome = room.run(command, folder)
        assert outcome.code == 0 and outcome.err.count("\n") <= 1 and len(missing) <= 1, f"{what}: {outcome.err}"
        assert "damaged" in outcome.err or (not missing and outcome.out == expected), f"{what}: {outcome.out}"
        reported += bool(outcome.err)
        path.write_bytes(content)
    print(f"{count} flips of annotations, {reported} reported, at most one event skipped each time")


@some_or(60, 3)
def test_a_flipped_bit_of_an_unfinished_scan_is_refused_or_harmless(room: Room, count: int) -> None:
    clean, draw = room.clean("scan"), random.Random(3)
    events = clean.outcome.events[: [event.endswith("triggers.parquet") for event in clean.outcome.events].index(True)]
    saved = max(number for number, event in enumerate(events) if "parts" in event)
    before = room.start("scan", "unfinished")
    assert room.run(STEPS["scan"].command, before, at=saved).code == -9
    names, refused = [name for name in sorted(contents(before)) if not name.endswith("/")], 0
    for number in range(count):
        folder = shutil.copytree(before, room.work / f"unfinished-{number}")
        what = change_file(folder / names[number % len(names)], draw)
        outcome = room.run(STEPS["scan"].command, folder)
        if outcome.code:
            check_refusal(outcome, what)
            refused += 1
        else:
            assert room.result("scan", folder) == clean.result, what
        shutil.rmtree(folder)
    print(f"{count} flips of an unfinished scan, {refused} refused, none wrong")


KILLED = [step for step in STEPS if "shard" not in step]


def each_step(count: int, *by_default: str) -> pytest.MarkDecorator:
    """Run a test once for some steps by default, and `count` times for each step as a sweep."""
    some = [pytest.param(step, 1) for step in by_default]
    return pytest.mark.parametrize(
        ("step", "count"), some + [pytest.param(step, count, marks=pytest.mark.sweep) for step in KILLED]
    )


@each_step(4, "scan", "annotate", "push", "pull")
def test_the_same_bytes_after_a_kill_at_any_event(room: Room, step: str, count: int) -> None:
    clean, draw = room.clean(step), random.Random(step)
    killed = 0
    for at in draw.sample(range(len(clean.outcome.events)), count):
        folder, where = room.start(step, f"{step}-killed-{at}"), f"killed at event {at}, {clean.outcome.events[at]}"
        outcome = room.run(STEPS[step].command, folder, at=at)
        assert outcome.code == -9 or (outcome.code == 0 and "workers" in step), where
        if step in ("annotate", "push"):  # all of it or nothing
            assert room.result(step, folder) in ({}, clean.result), where
        killed += outcome.code == -9
        room.resume(step, folder, where)
    print(f"{step}: {killed} kills, the same bytes after each")


@pytest.mark.sweep
def test_workers_leave_what_one_process_leaves(room: Room) -> None:
    assert room.clean("scan with workers").result == room.clean("scan").result


@pytest.mark.parametrize("fault", ["ENOSPC", "EIO", SHORT])
@each_step(2, "scan")
def test_the_same_bytes_after_a_full_or_failing_disk(room: Room, step: str, count: int, fault: str) -> None:
    clean, draw = room.clean(step), random.Random(step + fault)
    sizes = sorted({len(content) - 1 for content in clean.result.values() if len(content) > 1500})
    refused = 0
    for at in draw.sample(sizes if fault == SHORT else range(len(clean.outcome.events)), count):
        folder, where = room.start(step, f"{step}-{fault}-{at}"), f"{fault} at {at}"
        outcome = room.run(STEPS[step].command, folder, at=at, fault=fault)
        if outcome.code:
            check_refusal(outcome, where)
            refused += 1
        room.resume(step, folder, where)
    print(f"{step}: {count} times {fault}, {refused} refused, the same bytes after each")


@pytest.mark.parametrize("step", ["values", *(pytest.param(step, marks=pytest.mark.sweep) for step in KILLED)])
def test_a_read_only_folder_is_one_line_and_left_alone(room: Room, step: str) -> None:
    folder = room.start(step, f"{step}-read-only")
    before = contents(folder)
    outcome = room.run(STEPS[step].command, folder, at=0, fault="EROFS")
    if step != "push":  # reads the index only
        check_refusal(outcome, step)
    assert contents(folder) == before


def test_a_read_only_index_can_be_read(room: Room) -> None:
    folder = shutil.copytree(room.clean("annotate").folder, room.work / "read-only")
    for command in READERS[:6]:
        expected, outcome = room.run(command, folder), room.run(command, folder, at=0, fault="EROFS")
        assert (outcome.code, outcome.out) == (0, expected.out), f"{command}: {outcome.err}"


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.sweep)])
@each_step(2, "push")
def test_a_signal_at_any_call_is_one_line_and_the_same_bytes_after(
    room: Room, step: str, count: int, name: str
) -> None:
    calls, draw, stopped = len(room.clean(step, "calls").outcome.events), random.Random(step + name), 0
    for at in (draw.randrange(calls) for _ in range(count)):
        folder, where = room.start(step, f"{step}-{name}-{at}"), f"{name} at call {at} of {calls}"
        outcome = room.run(STEPS[step].command, folder, at=at, fault=name, counts="calls")
        code = {"SIGTERM": 143, "SIGINT": 130}[name]
        assert outcome.code in (0, code, code - 128 and -(code - 128)), f"{where}: {outcome.code} {outcome.err}"
        if outcome.code == code:
            *notes, last = outcome.err.split("\n")[:-1]
            assert last.startswith("memlens: interrupted"), f"{where}: {outcome.err}"
            assert "\r" not in outcome.err and not any("Traceback" in note for note in notes), f"{where}: {outcome.err}"
            stopped += 1
        room.resume(step, folder, where)
    print(f"{step}: {count} times {name}, {stopped} before the end, the same bytes after each")


WRITERS = ("annotate {}/index label --annotator ann --memory L2N3",
           *(STEPS[step].command for step in ("values", "patterns", "roles", "experiment", "report")))  # fmt: skip
RACED = (*READERS[:8], "check {}/index", "answer", *WRITERS)


class Race:
    """Two complete indexes of different texts. The second has fewer layers, so labels of the first do not fit it."""

    def __init__(self, room: Room) -> None:
        self.room, self.before = room, room.work / "race-before"
        shutil.copytree(room.clean("experiment").folder, self.before)
        scan = "scan {inputs}/model {inputs}/two.txt --threads 1 --top 5 --layers 0-1 -o"
        self.fresh = f"{scan} {{}}/index --fresh"
        for command in (f"{scan} {{}}/other", *(STEPS[step].command for step in ("values", "patterns", "roles"))):
            assert room.run(command.replace("/index", "/other"), self.before).code == 0
        assert room.run(STEPS["experiment"].command.replace("/index", "/other"), self.before).code == 0

    def run(self, command: str, change: list[str] | None = None, at: int | None = None) -> tuple[Outcome, bytes]:
        """Run a command in a new copy, in which everything is replaced at an event."""
        self.folder = self.room.work / "race"
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.before, self.folder)
        meanwhile = [[word.format(self.folder, inputs=self.room.inputs) for word in change or []]]
        command = f"answer {{}}/index {' '.join(ADDRESSES)}" if command == "answer" else command
        fault = {} if at is None else {"at": at, "fault": "SIGSTOP", "meanwhile": meanwhile}
        outcome = self.room.run(command, self.folder, counts="looks", **fault)
        page = self.folder / "page.html"
        return outcome, page.read_bytes() if page.exists() else b""

    def manifests(self) -> set[bytes]:
        return {(self.folder / name / "manifest.json").read_bytes() for name in ("index", "other")}


@pytest.fixture(scope="module")
def race(room: Room) -> Race:
    return Race(room)


@pytest.mark.parametrize(
    ("command", "count"), [(RACED[0], 1), *(pytest.param(name, 3, marks=pytest.mark.sweep) for name in RACED)]
)
def test_an_index_replaced_under_a_command_gives_the_old_or_new_result_or_one_line(
    race: Race, command: str, count: int
) -> None:
    draw, refused = random.Random(command), 0
    undisturbed = race.run(command)
    assert undisturbed[0].code == 0, undisturbed[0].err
    known = race.manifests()
    for number in range(count):
        is_scan = number == 1 or command in WRITERS  # a folder swapped under a writer is not defended
        change = ["memlens", *race.fresh.split(" ")] if is_scan else ["swap", "{}/index", "{}/other"]
        after = race.run(command, change, 0)
        known |= race.manifests()
        at = draw.randrange(len(undisturbed[0].events))
        outcome, page = race.run(command, change, at)
        where = f"{change[0]} at event {at}, {undisturbed[0].events[at]}"
        if command == "answer" and outcome.code == 0:
            check_answers(outcome, (undisturbed[0], after[0]), where)
        elif outcome.code == 0 and "annotate" not in command:
            assert (outcome.out, page) in {(one.out, written) for one, written in (undisturbed, after)}, where
        elif outcome.code:
            if command != "check {}/index":
                check_refusal(outcome, where)
            refused += 1
        assert race.manifests() <= known, f"{where}: a mixture of two indexes"
        for name in ("index", "other"):
            assert room_check(race.folder / name), where
    print(f"{command}: {count} replacements, {refused} refused, none wrong")


@pytest.mark.sweep
@pytest.mark.parametrize("count", [20])
def test_a_table_deleted_under_patterns_is_one_line_or_changes_nothing(room: Room, count: int) -> None:
    clean, draw, refused = room.clean("patterns", "looks"), random.Random(4), 0
    tables = sorted(name for name in contents(room.clean("values").folder) if name.endswith(".parquet"))
    for number in range(count):
        folder, table = room.start("patterns", f"deleted-{number}"), draw.choice(tables)
        at = draw.randrange(len(clean.outcome.events))
        change = {"at": at, "fault": "SIGSTOP", "meanwhile": [["remove", folder / table]]}
        outcome = room.run(STEPS["patterns"].command, folder, counts="looks", **change)
        where = f"{table} deleted at event {at}, {clean.outcome.events[at]}"
        if outcome.code:
            check_refusal(outcome, where)
            refused += 1
        else:
            found = room.result("patterns", folder)
            assert all(found[name] == clean.result[name] for name in ("patterns.parquet", "names.parquet")), where
    print(f"{count} tables deleted, {refused} refused, none wrong")


def check_answers(outcome: Outcome, right: tuple[Outcome, Outcome], where: str) -> None:
    """Each answer of a server is that of the old or the new index, or a refusal."""
    for number, line in enumerate(outcome.out.splitlines()):
        status, answer = json.loads(line)
        expected = [json.loads(one.out.splitlines()[number])[1] for one in right if one.code == 0]
        is_right = status == 200 and (answer in expected or "annotate" in ADDRESSES[number])
        is_refused = status in (403, 404, 409, 422) and "Traceback" not in answer
        assert is_right or is_refused, f"{where}, {ADDRESSES[number]}: {status} {answer[:300]}"


def room_check(folder: Path) -> bool:
    """Return True if every table is whole and every label belongs to a memory of the index."""
    index = Index(folder)
    for event in Annotations(index).history():
        if event["subject"]:
            index.check(event["subject"])
    return check_index(folder).is_whole


@pytest.mark.sweep
@pytest.mark.parametrize("count", [100])
def test_many_clients_get_right_answers_and_the_server_does_not_grow(room: Room, count: int) -> None:
    """64 clients send `count` requests each. What the server holds after a quarter of them is all it needs."""
    folder = room.clean("annotate").folder
    command = [sys.executable, "-m", "memlens", "serve", str(folder / "index"), "--port", "0", "--no-model"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert server.stdout is not None
    address, pages = server.stdout.readline().strip(), [page for page in ADDRESSES if page.startswith("/")]
    try:
        expected = {page: fetch(address, page) for page in pages}
        wrong: list[str] = []

        def ask(client: int, requests: int) -> None:
            draw = random.Random(client)
            for page in (draw.choice(pages) for _ in range(requests)):
                if (answer := fetch(address, page)) not in (expected[page], 503):
                    wrong.append(f"{page}: {str(answer)[:200]}")

        memory = []
        for requests in (max(count // 4, 1), count - count // 4):
            clients = [threading.Thread(target=ask, args=(client, requests)) for client in range(64)]
            for client in clients:
                client.start()
            for client in clients:
                client.join()
            memory.append(resident(server.pid))
        print(f"64 clients, {64 * count} requests, {memory[0]} then {memory[1]} MB")
        assert wrong == [] and memory[1] < memory[0] * 1.1 + 10
    finally:
        server.terminate()
        assert server.wait(60) == 143


def fetch(address: str, page: str) -> bytes | int:
    """Return the content of a page, or the status of an error."""
    try:
        with urllib.request.urlopen(address.rstrip("/") + page, timeout=300) as answer:
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        return error.code


def resident(process: int) -> int:
    """Return the memory of a process in MB."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmRSS"))


def test_nothing_is_renamed_before_it_is_synced(room: Room) -> None:
    """After a power failure, a name must never stand for bytes that did not reach the disk."""
    synced: set[str] = set()
    for event in room.clean("values").outcome.events + room.clean("scan").outcome.events:
        kind, _, path = event.partition(" ")
        if kind == "fsync":
            synced.add(path)
        elif kind == "write":
            synced.discard(path)
        elif kind in ("replace", "rename") and not path.startswith("index/partial/"):
            assert path in synced, f"{path} was renamed before it was synced"
