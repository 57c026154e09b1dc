"""The ordered map: order, retries, errors, interruption, and workers that end with their driver."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memlens import pool as pool_module
from memlens.errors import CorpusError, WorkerError
from memlens.pool import PickledSource, Pool, ProcessPool, SerialPool
from processes import list_workers, wait_until_ended
from waiting import wait_until


def add(value: int, item: int) -> int:
    return value + item


def finish_last(folder: Path, item: int) -> int:
    """Finish item 0 after item 3, which another worker does."""
    if item == 3:
        (folder / "done").touch()
    if item == 0:
        wait_until((folder / "done").exists, "another worker does item 3")
    return item


def die_once(folder: Path, item: int) -> int:
    """Kill the worker of item 3 at the first attempt."""
    if item == 3 and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def name_process(folder: Path, item: int) -> tuple[int, int]:
    return item, os.getpid()


def die_once_elsewhere(folder: Path, item: int) -> int:
    """Kill the first worker process, which is not the driver of the test."""
    if "pytest" not in sys.modules and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def die(value: None, item: int) -> int:
    with open("/proc/self/status", encoding="ascii"):  # noqa: PTH123
        os._exit(7)


def refuse(value: None, item: int) -> int:
    raise CorpusError(f"item {item} is bad")


def fail(value: None, item: int) -> int:
    return 1 // item


def read_missing_file(folder: Path, item: int) -> bytes:
    return (folder / "missing").read_bytes()


class Panic(BaseException):
    pass


def panic(value: None, item: int) -> int:
    raise Panic("called `Result::unwrap()` on an `Err` value")


def look_around(value: None, item: int) -> tuple[bool, bool, str]:
    ignored = signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    return ignored, "torch" in sys.modules, os.environ["TOKENIZERS_PARALLELISM"]


@pytest.mark.parametrize("pool", [SerialPool(10), ProcessPool(PickledSource(10), 2)], ids=["serial", "processes"])
def test_results_are_those_of_a_loop(pool: Pool) -> None:
    assert list(pool.map(add, range(20))) == list(range(10, 30))


def test_results_come_in_the_order_of_items(tmp_path: Path) -> None:
    assert list(ProcessPool(PickledSource(tmp_path), 2).map(finish_last, range(6))) == list(range(6))


def test_few_items_are_in_flight() -> None:
    read: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(1000):
            read.append(number)
            yield number

    results = ProcessPool(PickledSource(0), 2).map(add, numbers())
    assert next(results) == 0 and len(read) <= 2 + pool_module.AHEAD + 1
    results.close()  # type: ignore[attr-defined]


def test_no_item_starts_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_start_executor", None)
    assert list(ProcessPool(PickledSource(0), 2).map(add, [])) == []


def test_the_item_of_a_killed_worker_is_done_by_another(tmp_path: Path) -> None:
    assert list(ProcessPool(PickledSource(tmp_path), 2).map(die_once, range(8))) == list(range(8))
    assert (tmp_path / "died").exists()


def test_the_driver_may_be_one_of_the_workers(tmp_path: Path) -> None:
    pool = ProcessPool(PickledSource(tmp_path), 2, driver_works=True)
    results = list(pool.map(name_process, range(20)))
    assert [item for item, _ in results] == list(range(20))
    processes = {process for _, process in results}
    assert os.getpid() in processes and len(processes) <= 2
    assert list(pool.map(name_process, [7])) == [(7, os.getpid())]
    (tmp_path / "died").unlink(missing_ok=True)
    assert list(pool.map(die_once_elsewhere, range(8))) == list(range(8))


def test_an_error_of_the_driver_is_that_of_a_worker(tmp_path: Path) -> None:
    pool = ProcessPool(PickledSource(tmp_path), 2, driver_works=True)
    with pytest.raises(RuntimeError, match=r"a worker failed:(.|\n)*in read_missing_file(.|\n)*FileNotFoundError"):
        list(pool.map(read_missing_file, [0]))


def test_an_item_that_kills_every_worker_is_given_up() -> None:
    with pytest.raises(WorkerError, match=r"a worker process died \(EXIT\(7\)\) 4 times in a row on the same work"):
        list(ProcessPool(PickledSource(None), 1).map(die, [0]))


def test_an_error_of_memlens_is_raised_unchanged() -> None:
    with pytest.raises(CorpusError, match=r"^item 5 is bad$"):
        list(ProcessPool(PickledSource(None), 1).map(refuse, [5]))


@pytest.mark.parametrize(("function", "name"), [(fail, "ZeroDivisionError"), (panic, "Panic")])
def test_any_other_error_is_a_bug_with_the_traceback_of_the_worker(function: Any, name: str) -> None:
    with pytest.raises(RuntimeError, match=rf"a worker failed:(.|\n)*in {function.__name__}(.|\n)*{name}"):
        list(ProcessPool(PickledSource(None), 1).map(function, [0]))


def test_workers_leave_signals_to_the_driver_and_import_only_what_they_need() -> None:
    assert list(ProcessPool(PickledSource(None), 1).map(look_around, [0])) == [(True, False, "false")]


class NotUnpicklable:
    """A value that can be pickled, but not unpickled in another process."""

    def __init__(self) -> None:
        self.process = os.getpid()

    def __setstate__(self, state: dict[str, int]) -> None:
        raise FileNotFoundError("vocab.txt")


def process_of(value: NotUnpicklable, item: int) -> tuple[int, int]:
    return value.process, item


def test_a_value_that_workers_cannot_load_is_used_in_this_process() -> None:
    results = ProcessPool(PickledSource(NotUnpicklable()), 2).map(process_of, range(9))
    assert list(results) == [(os.getpid(), item) for item in range(9)]


def test_a_value_that_cannot_be_pickled_is_used_in_this_process() -> None:
    lock = __import__("threading").Lock()
    assert list(ProcessPool(PickledSource(lock), 2).map(lambda value, item: (value is lock, item), [1])) == [(True, 1)]


def test_modules_are_not_imported_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("loky", "pickle", "multiprocessing", "threading", "json", "torch", "memlens"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    program = (
        "from operator import add; from memlens.pool import *\n"
        "print(list(ProcessPool(PickledSource(1), 2).map(add, [1, 2])))"
    )
    process = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert (process.stdout, process.returncode) == ("[2, 3]\n", 0), process.stderr
    assert not (tmp_path / "executed").exists()


def test_an_interrupted_map_leaves_no_worker() -> None:
    calls: list[int] = []

    def stop() -> None:
        calls.append(1)
        if len(calls) > 3 and list_workers(os.getpid()):
            calls.extend(list_workers(os.getpid()))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(ProcessPool(PickledSource(600), 2, check_stop=stop).map(sleep, range(4)))
    wait_until_ended([number for number in calls if number > 1])


def sleep(seconds: int, item: int) -> None:
    time.sleep(seconds)


DRIVER = """
import os, time
from memlens.pool import PickledSource, ProcessPool
def work(value, item):
    if item: time.sleep(600)
for result in ProcessPool(PickledSource(None), 2).map(work, range(4)):
    print("busy", flush=True)
"""


def test_workers_end_within_seconds_when_their_driver_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None and driver.stdout.readline() == "busy\n"
        workers = list_workers(driver.pid)
        driver.kill()
    assert len(workers) == 2
    wait_until_ended(workers)


def test_a_system_without_processes_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(WorkerError, match=r"cannot start a worker process|a worker process died"):
        list(ProcessPool(PickledSource(0), 1).map(add, [1]))
