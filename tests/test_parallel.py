"""Ctrl-C and TERM are raised between two steps of the main thread, wherever it is; freed memory is given back."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import typer

from memlens.cli import app
from memlens.parallel import Interrupted, Terminated, interruptible, stop_on_signal


def send_after(seconds: float, number: int = signal.SIGINT) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()


@pytest.mark.parametrize(
    ("number", "kind", "code"), [(signal.SIGINT, Interrupted, 130), (signal.SIGTERM, Terminated, 143)]
)
def test_a_signal_is_raised_in_a_busy_main_thread(number: int, kind: type[Interrupted], code: int) -> None:
    send_after(0.2, number)
    with pytest.raises(kind) as caught, interruptible():
        while True:
            sum(range(100))
    assert caught.value.code == code


def test_a_main_thread_that_waits_for_another_is_woken() -> None:
    send_after(0.2)
    began = time.monotonic()
    with pytest.raises(Interrupted), interruptible():
        threading.Event().wait(60)
    assert time.monotonic() - began < 30


class Slow:
    """Its end takes a second, and what is raised there is reported and goes no further."""

    def __del__(self) -> None:
        until = time.monotonic() + 1
        while time.monotonic() < until:
            sum(range(100))


def test_an_interrupt_that_gets_lost_is_raised_again_and_not_reported(capsys: pytest.CaptureFixture[str]) -> None:
    send_after(0.2)
    until = time.monotonic() + 60
    with pytest.raises(Interrupted), interruptible():
        Slow()
        while time.monotonic() < until:
            sum(range(100))
    assert capsys.readouterr().err == ""


def test_a_signal_while_the_options_are_read_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = typer.Typer()

    @parser.callback(invoke_without_command=True)
    def read_options() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            sum(range(100))

    monkeypatch.setattr(app, "make_app", lambda only: parser)
    assert app.run([]) == 143
    assert capsys.readouterr().err == "memlens: interrupted; run the same command again to continue\n"


def test_an_error_of_a_library_after_the_signal_is_the_interruption() -> None:
    with pytest.raises(Interrupted), interruptible():
        os.kill(os.getpid(), signal.SIGINT)
        raise RuntimeError("Query interrupted")


def test_a_stopper_notes_the_first_signal_and_lets_the_second_through() -> None:
    with stop_on_signal() as stopper:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        with pytest.raises(Interrupted):
            stopper.check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_mapped_file_that_is_cut_ends_the_process_with_one_line(tmp_path: Path) -> None:
    program = (
        "import mmap, os, sys\nfrom memlens.parallel import cut_files_in_words\n"
        "with cut_files_in_words(), open(sys.argv[1], 'r+b') as file:\n"
        "    mapped = mmap.mmap(file.fileno(), 0)\n    os.truncate(sys.argv[1], 0)\n    print(mapped[5000])\n"
    )
    (tmp_path / "file").write_bytes(bytes(8192))
    ran = subprocess.run([sys.executable, "-c", program, tmp_path / "file"], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (2, "") and ran.stderr.count("\n") == 1 and "cut short" in ran.stderr


def test_a_second_signal_ends_the_process_at_once() -> None:
    program = (
        "import time\nfrom memlens.parallel import Interrupted, interruptible\n"
        "with interruptible():\n    try:\n        print('ready', flush=True)\n        while True: time.sleep(0.01)\n"
        "    except Interrupted:\n        print('first', flush=True)\n        while True: time.sleep(0.01)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for expected in ("ready", "first"):
            assert process.stdout.readline().strip() == expected
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=300) == 130
