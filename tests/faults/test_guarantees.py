"""The guarantees of docs/security.md under faults: no wrong answer, no lost event, no traceback, no orphan process.

A seed draws each fault: a bit of a file, or an event of a command (see events.py). Each test tries a few faults by
default and all as a sweep, and prints how many it tried. The whole trial:

    pytest -s -m sweep tests/faults tests/cli/test_bad_inputs.py tests/web/test_web_schema.py
"""

from __future__ import annotations

import errno
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext, redirect_stderr, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from events import Events, Fault, run_until_killed
from fastapi.testclient import TestClient

import memlens
from full_disk import files_no_larger_than
from hub_stand_in import Hub, connected
from memlens.annotations.records import Annotations, Label, LabeledPattern
from memlens.cli import main
from memlens.errors import MemlensError
from memlens.index.check import check_index
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.testing import save_tiny
from memlens.web.app import create_app
from memlens.web.workbench import Workbench
from processes import list_processes
from waiting import PATIENCE, wait_until

TEXT = (
    "The river runs to the sea. The river runs to the hills. The press was free in the city of Paris.\n"
    "Rain fell on the hills, and the rivers rose. In 1990 a small house opened near the river.\n"
    "The end of the war came in the spring, as the papers of the day had said. The city was free.\n"
)
SCAN = "scan {inputs}/model {inputs}/one.txt {inputs}/two.txt --threads 1 --top 5 -o"

# Commands that are killed are forked from a process that has imported the libraries and done nothing else.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["duckdb", "memlens.index.build", "transformers.models.llama.modeling_llama"])


class Step(NamedTuple):
    """A command, the step whose result it starts from, and what it writes. {} is the folder of a run."""

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
    "report {}/index -o {}/page.html", "annotate {}/index status --json",
    "serve",
)  # fmt: skip
WRITERS = ("annotate {}/index label --annotator ann --memory L2N3", "experiment {}/index agreement --json",
           *(STEPS[step].command for step in ("values", "patterns", "roles", "experiment", "report")))  # fmt: skip
PAGES = ("/api/counts", "/api/layers", "/api/memories/L1N3", "/api/search?q=river", "/api/map", "/m/L1N3",
         "/api/annotate", "/api/memories/L0N2", "/api/compare?by=triggers&layers=0:1")  # fmt: skip


class Outcome(NamedTuple):
    """The end of a command. `out` includes the page that it wrote, if any."""

    code: int
    out: str
    err: str


class Clean(NamedTuple):
    """A step without a fault."""

    folder: Path
    events: list[str]
    result: dict[str, bytes]


class Room:
    """Runs commands in copies of folders."""

    def __init__(self, hub: Hub, inputs: Path, work: Path) -> None:
        self.hub, self.inputs, self.work = hub, inputs, work
        self.clean = cache(self._clean)
        self.longest_end = 0.0  # seconds from the kill of a command to the end of its last worker

    def words(self, command: str, folder: Path) -> list[str]:
        return [word.format(folder, inputs=self.inputs, name=folder.name) for word in command.split(" ")]

    def run(self, command: str, folder: Path, fault: Fault | None = None) -> Outcome:
        """Run a command in this process. self.events lists its events."""
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
        page = folder / "page.html"
        page.unlink(missing_ok=True)
        with redirect_stdout(out), redirect_stderr(err), Events(folder, fault) as listed:
            code = ask_server(folder / "index") if command == "serve" else main(self.words(command, folder))
        self.events = listed.log
        texts: Any = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
        return Outcome(code, texts[0] + (page.read_text("utf-8") if page.exists() else ""), texts[1])

    def kill(self, command: str, folder: Path, number: int) -> Outcome:
        """Kill a process at an event. Returns when its workers have ended as well."""
        arguments = (self.words(command, folder), folder, number, self.hub.address)
        process = FORKSERVER.Process(target=run_until_killed, args=arguments)
        process.start()
        process.join()
        began = time.monotonic()
        wait_until(lambda: all(one.session != process.pid for one in list_processes()), f"the workers of {command} end")
        self.longest_end = max(self.longest_end, time.monotonic() - began)
        return Outcome(process.exitcode or 0, "", "")

    def start(self, step: str, name: str) -> Path:
        """Return a new folder with what a step starts from."""
        folder = self.work / name
        shutil.rmtree(folder, ignore_errors=True)
        if after := STEPS[step].after:
            shutil.copytree(self.clean(after).folder, folder)
        else:
            folder.mkdir()
        self.hub.blobs.clear()  # files that the Hub has are not sent again
        self.hub.commits.pop(f"me/{name}", None)
        return folder

    def _clean(self, step: str) -> Clean:
        if step == "pull":
            self.clean("push")
        folder = self.start(step, f"{step.replace(' ', '-')}-clean")
        outcome = self.run(STEPS[step].command, folder)
        assert outcome.code == 0, outcome.err
        return Clean(folder, self.events, self.result(step, folder))

    def result(self, step: str, folder: Path) -> dict[str, bytes]:
        """Return what a step wrote: files, events of annotations, or files on the Hub except those about the commit."""
        if step == "annotate":
            return {event["key"]: repr(event).encode() for event in Annotations(Index(folder / "index")).history()}
        if step == "push":
            _, files = self.hub.at(f"me/{folder.name}", "main") or ("", {})
            return {name: files[name] for name in files if name not in ("README.md", ".gitattributes")}
        return contents(folder / STEPS[step].output)


def ask_server(folder: Path) -> int:
    """Print the answers of a server: lines of JSON with status and text. The last one is that of saving a label."""
    try:
        workbench = Workbench(folder)
    except MemlensError as error:
        print(f"memlens: {error}", file=sys.stderr)
        return 2
    client, label = TestClient(create_app(workbench), "http://127.0.0.1:8000"), {"annotator": "ann", "memory": "L2N3"}
    answers = [client.get(page) for page in PAGES]
    answers.append(client.post("/api/annotate/labels", json={**label, "patterns": []}))
    workbench.close()
    print("\n".join(json.dumps([answer.status_code, answer.text]) for answer in answers))
    return 0


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files but locks, and empty folders, whose names end in a slash."""
    paths = [path for path in sorted(folder.rglob("*")) if not path.name.endswith("lock")]
    empty = {f"{path.relative_to(folder)}/": b"" for path in paths if path.is_dir() and not any(path.iterdir())}
    return empty | {str(path.relative_to(folder)): path.read_bytes() for path in paths if path.is_file()}


def is_refused(outcome: Outcome, right: Collection[str], where: str, code: int = 2) -> bool:
    """Judge a command: it gives a right answer, or this exit code and one line, which a note may precede."""
    if outcome.code == 0:
        assert outcome.out in right, f"{where}: a wrong answer, {outcome.out[:500]}"
        return False
    *notes, line = outcome.err.splitlines() or [""]
    assert outcome.code == code and len(notes) <= 1 and "\r" not in outcome.err, f"{where}: {outcome}"
    assert (line.startswith("memlens: ") and "bug in memlens" not in line) or code < 0, f"{where}: {outcome}"
    return True


def at(number: int, act: Callable[[], object]) -> Fault:
    """Return a fault that acts at one event."""
    return lambda event_number, _event: act() if event_number == number else None


def fail(name: str) -> None:
    raise OSError(code := getattr(errno, name), os.strerror(code))


def read_only(_number: int, event: str) -> None:
    """Fail at each event that changes a file."""
    if not event.startswith(("read", "send")):
        fail("EROFS")


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    inputs = tmp_path_factory.mktemp("inputs")
    save_tiny(inputs / "model", "llama")
    (inputs / "one.txt").write_text(TEXT)
    (inputs / "two.txt").write_text(TEXT.replace("river", "road"))
    with connected(inputs / "home") as hub:
        room = Room(hub, inputs, tmp_path_factory.mktemp("room"))
        labeled = shutil.copytree(room.clean("scan").folder, room.work / "labeled")
        notes = Annotations(Index(labeled / "index"))
        for person in ("ann", "zoë"):
            pattern = LabeledPattern("ends with river " * 40, "shallow", (0, 1, 2))
            notes.save(*(Label(person, MemoryId(1, memory), (pattern,)) for memory in range(8)))
        assert room.run("annotate {}/index backup {inputs}/labels.json", labeled).code == 0
        yield room


def sample_or_sweep(sample: list[tuple[Any, ...]], sweep: list[tuple[Any, ...]]) -> list[Any]:
    return [pytest.param(*one) for one in sample] + [pytest.param(*one, marks=pytest.mark.sweep) for one in sweep]


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


@pytest.mark.parametrize("count", sample_or_sweep([(8,)], [(300,)]))
def test_a_flipped_bit_or_a_missing_file_gives_the_same_answer_or_one_line(room: Room, count: int) -> None:
    whole, folder, draw, refused = room.clean("annotate").folder, room.work / "flipped", random.Random(1), 0
    names, made = sorted({*contents(whole)} - {"index/annotations.jsonl"}), ("patterns.parquet", "names.parquet")
    shutil.copytree(whole, folder)
    right = {command: room.run(command, folder) for command in (*READERS[:-1], WRITERS[1])}
    for number in range(count):
        name, command = names[number % len(names)], draw.choice(list(right))
        what = change_file(folder / name, draw, is_removed=number % 10 == 9)
        refused += is_refused(room.run(command, folder), [right[command].out], f"{what}, {command}")
        if number % 10 == 0:  # no table is made from damaged ones
            outcome, expected = room.run("patterns {}/index", folder), contents(whole / "index")
            is_refused(outcome, [outcome.out], what)
            tables = contents(folder / "index")
            assert all(tables.get(table) == expected[table] for table in made if not name.endswith(table)), what
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
    print(f"{count} flips and removals, {refused} refused, none wrong")


@pytest.mark.parametrize("count", sample_or_sweep([(4,)], [(100,)]))
def test_a_flipped_bit_costs_at_most_one_line_of_annotations_which_is_reported(room: Room, count: int) -> None:
    clean, draw, command, reported = room.clean("annotate"), random.Random(2), "annotate {}/index status --json", 0
    folder = shutil.copytree(clean.folder, room.work / "flipped-lines")
    path, right = folder / "index" / "annotations.jsonl", room.run(command, folder)
    for _ in range(count):
        what, outcome = change_file(path, draw), room.run(command, folder)
        missing = clean.result.keys() - room.result("annotate", folder).keys()
        assert outcome.code == 0 and outcome.err.count("\n") <= 1 and len(missing) <= 1, f"{what}: {outcome.err}"
        assert "damaged" in outcome.err or (not missing and outcome.out == right.out), f"{what}: {outcome.out}"
        reported += bool(outcome.err)
        shutil.copy(clean.folder / "index" / "annotations.jsonl", path)
    print(f"{count} flips of annotations, {reported} reported, at most one event skipped each time")


@pytest.mark.parametrize("count", sample_or_sweep([(3,)], [(60,)]))
def test_a_flipped_bit_of_an_unfinished_scan_is_refused_or_harmless(room: Room, count: int) -> None:
    clean, draw, refused, before = room.clean("scan"), random.Random(3), 0, room.start("scan", "unfinished")
    first_table = next(number for number, event in enumerate(clean.events) if "triggers.parquet" in event)
    assert room.run(STEPS["scan"].command, before, at(first_table, lambda: fail("ENOSPC"))).code == 2
    names = [name for name in sorted(contents(before)) if not name.endswith("/")]
    assert any("parts" in name for name in names)
    for number in range(count):
        folder = shutil.copytree(before, room.work / "unfinished-copy")
        what = change_file(folder / names[number % len(names)], draw)
        outcome = room.run(STEPS["scan"].command, folder)
        is_right = not is_refused(outcome, [outcome.out], what)
        assert not is_right or room.result("scan", folder) == clean.result, what
        refused += not is_right
        shutil.rmtree(folder)
    print(f"{count} flips of an unfinished scan, {refused} refused, none wrong")


FAULTS = {"SIGKILL": 4, "SIGTERM": 1, "SIGINT": 1, "ENOSPC": 1, "EIO": 1, "EFBIG": 1, "EROFS": 1}
FAULTY = [step for step in STEPS if "shard" not in step]
SAMPLE = [(step, "SIGKILL", 1) for step in FAULTY if step != "scan with workers"]
SAMPLE += [
    ("push", "SIGTERM", 1),
    ("scan", "ENOSPC", 1),
    ("scan", "EIO", 1),
    ("scan", "EFBIG", 1),
    ("values", "EROFS", 1),
]
SWEEP = [(step, *fault) for step in FAULTY for fault in FAULTS.items() if (step, *fault) not in SAMPLE]


@pytest.mark.parametrize(("step", "fault", "count"), sample_or_sweep(SAMPLE, SWEEP))
def test_the_same_bytes_after_a_fault_at_any_event(room: Room, step: str, fault: str, count: int) -> None:
    """Send a signal or raise an error at an event, refuse all changes (EROFS), or limit the size of files (EFBIG)."""
    command, clean, draw, stopped = STEPS[step].command, room.clean(step), random.Random(step + fault), 0
    changes = [number for number, event in enumerate(clean.events) if not event.startswith("read")]
    written = clean.result.values()
    if step == "annotate":  # its results are the lines of one file
        written = [(clean.folder / "index" / "annotations.jsonl").read_bytes()]
    sizes = sorted({len(content) - 1 for content in written if len(content) > 1500})
    codes = {"SIGKILL": -9, "SIGTERM": 143, "SIGINT": 130}
    for place in draw.sample({"EIO": range(len(clean.events)), "EFBIG": sizes}.get(fault, changes), count):
        folder, where = room.start(step, "faulty"), f"{step}, {fault} at {place}"
        before = contents(folder)
        if fault == "SIGKILL":
            outcome = room.kill(command, folder, place)
        elif fault in codes:
            outcome = room.run(command, folder, at(place, lambda: os.kill(os.getpid(), signal.Signals[fault])))
        elif fault == "EROFS":
            outcome = room.run(command, folder, read_only)
            assert contents(folder) == before, where
        else:
            with files_no_larger_than(place) if fault == "EFBIG" else nullcontext():
                outcome = room.run(command, folder, None if fault == "EFBIG" else at(place, lambda: fail(fault)))
        stopped += is_refused(outcome, [outcome.out], where, codes.get(fault, 2))
        if step in ("annotate", "push"):  # all of it or nothing
            assert room.result(step, folder) in ({}, clean.result), where
        again = room.run(command, folder)
        assert again.code == 0, f"{where}: {again.err}"
        result = room.result(step, folder)
        assert [name for name in {*result, *clean.result} if result.get(name) != clean.result.get(name)] == [], where
    print(f"{step}: {count} times {fault}, {stopped} stopped it, the same bytes after each")
    print(f"the workers of killed commands ended within {room.longest_end:.1f} s")
    assert stopped or fault != "SIGKILL"


@pytest.mark.sweep
def test_workers_leave_what_one_process_leaves(room: Room) -> None:
    assert room.clean("scan with workers").result == room.clean("scan").result


def test_a_read_only_index_can_be_read(room: Room) -> None:
    folder = shutil.copytree(room.clean("annotate").folder, room.work / "readers")
    for command in READERS[:6]:
        right = room.run(command, folder)
        assert not is_refused(room.run(command, folder, read_only), [right.out], command)


class Race:
    """Two complete indexes of different texts. The second has fewer layers, so labels of the first do not fit it."""

    def __init__(self, room: Room) -> None:
        self.room, self.before, self.folder = room, room.work / "race-before", room.work / "race"
        shutil.copytree(room.clean("experiment").folder, self.before)
        commands = [STEPS[step].command for step in ("values", "patterns", "roles", "experiment")]
        for command in ("scan {inputs}/model {inputs}/two.txt --threads 1 --top 5 --layers 0-1 -o {}/index", *commands):
            assert room.run(command.replace("/index", "/other"), self.before).code == 0
        self.manifests: set[bytes] = set()
        for act in (dict, self.scan):
            self.run(READERS[0], act, None)
            self.manifests |= self.check("before all races")

    def run(self, command: str, act: Callable[[], object], number: int | None) -> Outcome:
        """Run a command in a new copy, with an action at an event, or before the command."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.before, self.folder)
        if number is None:
            act()
        return self.room.run(command, self.folder, None if number is None else at(number, act))

    def swap(self) -> None:
        for name, new_name in (("index", "away"), ("other", "index"), ("away", "other")):
            (self.folder / name).rename(self.folder / new_name)

    def scan(self) -> None:
        inputs, options = self.room.inputs, {"threads": 1, "top": 5, "layers": "0-1", "resume": False}
        with suppress(MemlensError):  # a command that writes holds the lock
            memlens.scan(inputs / "model", inputs / "two.txt", out=self.folder / "index", **options)

    def check(self, where: str) -> set[bytes]:
        """Check that both indexes are whole and every label belongs to a memory. Returns their manifests."""
        indexes = [Index(self.folder / name) for name in ("index", "other")]
        for index in indexes:
            assert check_index(index.folder).is_whole, where
            for event in Annotations(index).history():
                index.check(event["subject"])
        return {(index.folder / "manifest.json").read_bytes() for index in indexes}


@pytest.fixture(scope="module")
def race(room: Room) -> Race:
    return Race(room)


RACES = [(command, 2) for command in (*READERS, *WRITERS)]


@pytest.mark.parametrize(("command", "count"), sample_or_sweep([(READERS[0], 1), ("serve", 1)], RACES))
def test_a_replacement_under_a_command_gives_the_old_or_new_result_or_one_line(
    race: Race, command: str, count: int
) -> None:
    """Swap the folder, scan into it, or delete a table. A swap under a command that writes is not defended."""
    undisturbed, draw, refused = race.run(command, dict, None), random.Random(command), 0
    log, manifests = race.room.events, race.manifests | race.check(command)
    expected = contents(race.folder / "index")
    tables = [name for name in expected if name.endswith(".parquet")]
    acts = (race.scan, race.swap) if command in READERS else (race.scan,)
    for act in acts:
        after = race.run(command, act, None)
        manifests |= race.check(command)
        for place in draw.choices(range(len(log)), k=count):
            where = f"{command}, {act.__name__} at event {place}, {log[place]}"
            refused += is_race_refused(command, race.run(command, act, place), [undisturbed, after], where)
            assert race.check(where) <= manifests, f"{where}: a mixture of two indexes"
    for table, place in zip(draw.sample(tables, count), draw.choices(range(len(log)), k=count), strict=True):
        outcome = race.run(command, (race.folder / "index" / table).unlink, place)
        where = f"{command}, {table} deleted at event {place}, {log[place]}"
        refused += (is_stopped := is_race_refused(command, outcome, [undisturbed], where))
        rest = {table: expected[table]} | contents(race.folder / "index")
        assert is_stopped or rest == expected or command in (WRITERS[0], "serve"), where
    print(f"{command}: {len(acts) * count} replacements, {count} tables deleted, {refused} refused, none wrong")


def is_race_refused(command: str, outcome: Outcome, right: list[Outcome], where: str) -> bool:
    """Judge a command, or each answer of a server except that of saving a label."""
    outputs = [one.out for one in right if one.code == 0]
    if command != "serve" or outcome.code:
        return is_refused(outcome, [outcome.out] if command == WRITERS[0] else outputs, where)
    for page, (line, *known) in enumerate(zip(*(text.splitlines() for text in (outcome.out, *outputs)), strict=True)):
        status, answer = json.loads(line)
        is_right = line in known or (page == len(PAGES) and status == 200)
        assert is_right or (status in (403, 404, 409, 422) and "Traceback" not in answer), f"{where}: {line[:300]}"
    return False


@pytest.mark.parametrize(("clients", "seconds"), sample_or_sweep([(3, 0)], [(64, 60)]))
def test_many_clients_get_right_answers_and_the_server_does_not_grow(room: Room, clients: int, seconds: int) -> None:
    """Each client asks for all pages, and then for any page. Caches of the server fill in a quarter of the time."""
    command = [sys.executable, "-m", "memlens", "serve", room.clean("annotate").folder / "index", "--no-model"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout is not None
    try:
        address = server.stdout.readline().strip().rstrip("/")
        right = {page: fetch(address + page) for page in PAGES}
        answers: dict[str, list[str]] = {"right": [], "busy": [], "wrong": []}

        def ask(client: int, until: float) -> None:
            draw = random.Random(client)
            pages = draw.sample(PAGES, len(PAGES))
            while pages or time.monotonic() < until:
                page = pages.pop() if pages else draw.choice(PAGES)
                answer = fetch(address + page)
                answers["right" if answer == right[page] else "busy" if answer == 503 else "wrong"].append(page)

        memory = []
        for share in (0.25, 0.75):
            until = time.monotonic() + share * seconds
            threads = [threading.Thread(target=ask, args=(client, until)) for client in range(clients)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            status = Path(f"/proc/{server.pid}/status").read_text().partition("VmRSS:")[2]
            memory.append(int(status.split()[0]) >> 10)
    finally:
        server.terminate()
        assert server.wait(PATIENCE) == 143
    counts = {kind: len(pages) for kind, pages in answers.items()}
    print(f"{clients} clients for {seconds} s, answers: {counts}, {memory[0]} then {memory[1]} MB")
    assert answers["right"] and not answers["wrong"] and memory[1] < memory[0] * 1.1 + 10


def fetch(address: str) -> bytes | int:
    """Return the content of a page, or the status of an error."""
    try:
        with urllib.request.urlopen(address, timeout=PATIENCE) as answer:
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        return error.code


def test_nothing_is_renamed_before_it_is_synced(room: Room) -> None:
    """After a power failure, a name must never stand for bytes that did not reach the disk."""
    synced: set[str] = set()
    for event in room.clean("values").events + room.clean("scan").events:
        kind, _, path = event.partition(" ")
        if kind == "sync":
            synced.add(path)
        elif kind == "open":
            synced.discard(path)
        elif kind == "rename" and not path.startswith("index/partial/"):
            assert path in synced, f"{path} was renamed before it was synced"
