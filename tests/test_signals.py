"""Ctrl-C and SIGTERM: raised in the main thread, noted by a stopper, and the second one ends a command at once."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from memlens.cli import app
from memlens.signals import Interrupted, Terminated, interruptible, stop_on_signal


def send_after(seconds: float, number: int = signal.SIGINT) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()


def work_for(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(100))


@pytest.mark.parametrize(
    ("number", "kind", "code"), [(signal.SIGINT, Interrupted, 130), (signal.SIGTERM, Terminated, 143)]
)
def test_a_signal_is_raised_in_a_busy_main_thread(number: int, kind: type[Interrupted], code: int) -> None:
    with pytest.raises(kind) as caught, interruptible():
        send_after(0.1, number)
        work_for(600)
    assert caught.value.code == code


def test_a_main_thread_that_waits_for_another_thread_is_woken() -> None:
    with pytest.raises(Interrupted), interruptible():
        send_after(0.1)
        threading.Event().wait(600)


class Signaling:
    """An object whose destructor sends a signal. Python reports an exception in it and continues."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        work_for(0.1)


def test_an_exception_that_is_dropped_is_raised_again_and_not_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Interrupted), interruptible():
        Signaling()
        work_for(600)
    assert capsys.readouterr().err == ""


def test_a_signal_while_options_are_parsed_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def parse(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        work_for(600)

    monkeypatch.setattr(app.program, "make_context", parse)
    assert app.run([]) == 143
    assert capsys.readouterr().err == "memlens: interrupted; run the same command again to resume\n"


def test_the_error_of_a_library_after_a_signal_is_an_interruption() -> None:
    with pytest.raises(Interrupted), interruptible():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            work_for(600)
        except KeyboardInterrupt:
            raise RuntimeError("Query interrupted") from None


def test_a_stopper_notes_the_first_signal_and_passes_on_the_second() -> None:
    with stop_on_signal() as stopper:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            work_for(600)
        with pytest.raises(Interrupted):
            stopper.check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


WORK = """
import time
from memlens.signals import interruptible, stop_on_signal
with interruptible():
    try:
        print("ready", flush=True)
        time.sleep(600)
    except KeyboardInterrupt:
        print("first", flush=True)
        time.sleep(600)
"""
SCAN = """
import time
from memlens.signals import interruptible, stop_on_signal
with interruptible(), stop_on_signal() as stopper:
    print("ready", flush=True)
    while not stopper.stopped:
        time.sleep(0.01)
    print("first", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("program", [WORK, SCAN], ids=["interruptible", "stopper"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_command_at_once(number: int, program: str) -> None:
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for expected in ("ready", "first"):
            assert process.stdout.readline().strip() == expected
            process.send_signal(number)
        assert process.wait(timeout=300) == 128 + number


def test_a_second_sigterm_ends_another_program_as_it_would_without_memlens() -> None:
    program = SCAN.replace("interruptible(), ", "")
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for expected in ("ready", "first"):
            assert process.stdout.readline().strip() == expected
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=300) == -signal.SIGTERM
