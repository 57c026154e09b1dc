"""Compiled loops, progress, and stopping by a signal.

Python runs a signal's handler wherever C code asks for it, also on the way out of a compiled loop, where an exception
is lost, reported as a SystemError or fatal. So handlers here do not raise:

    stop_on_signal   the first signal sets a flag, which long work checks where its state is whole
    interruptible    a second thread has the exception raised between two bytecodes of the main thread, and by a handler
                     only where the main thread waits for a lock, a socket or a process and runs no bytecode

Outside of the main thread signals cannot be handled, and nothing changes.
"""

import fcntl
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from types import FrameType
from typing import Any, Protocol

from memlens.loop_sources import LOOPS, stamp_


def compiled(function: Callable[..., Any]) -> Any:
    """The function as machine code, made when it is first called with arguments of new types, and kept on the disk.

    It is kept beside the package, or in the user's cache folder where that cannot be written to, until a file changes
    that it is made from (`loop_sources`), and made by one process at a time (unless that one does not go on), so that
    workers that start together load what the first made.

    For functions that Python calls; what only these call is a `compiled_part`. Each new combination of types, which an
    array's layout is part of, is compiled again: give arrays of one type and in C order.
    """
    from numba import njit

    options = {"nogil": True, "no_cfunc_wrapper": True}
    try:
        compiled = njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the home folder can be written to
        return njit(**options)(function)
    LOOPS.add(function)
    if compiled is function:  # NUMBA_DISABLE_JIT
        return function
    compile_ = compiled.compile

    def compile_in_turn(signature: Any) -> Any:
        with _turn_in(compiled.stats.cache_path):
            stamp_(compiled)
            try:
                return compile_(signature)
            except (AttributeError, ImportError, EOFError, UnpicklingError):
                compiled._cache.flush()  # what is kept is of another version, or cut short
                return compile_(signature)
            except OSError:  # it is made, but cannot be kept: the disk or a quota is full
                return compile_(signature)

    compiled.compile = compile_in_turn
    return compiled


_COMPILING = threading.RLock()
_turns: list[str] = []  # folders of functions that are being compiled, the outermost first
_TURN_SECONDS = 0.05  # between two tries
_MOST_SECONDS = 120.0  # far longer than any function takes: who holds the lock has been stopped (Ctrl-Z) or hangs
_given_up = set[str]()  # folders whose lock was not to be had for so long; nobody waits for it a second time
_spent = 0.0  # seconds by the clock, of the outermost functions


def seconds_compiling() -> float:
    """Seconds that compiled functions of this process have taken so far to be made, or loaded where they are kept."""
    return _spent


@contextmanager
def _turn_in(folder: str) -> Iterator[None]:
    """Wait until no other process compiles for the same folder, but not for ever."""
    global _spent
    with _COMPILING:
        began = time.monotonic()
        descriptor = _lock(folder) if not _turns else None
        _turns.append(folder)
        try:
            yield
        finally:
            _turns.pop()
            _spent += 0.0 if _turns else time.monotonic() - began
            if descriptor is not None:
                os.close(descriptor)


def _lock(folder: str) -> int | None:
    """A descriptor that holds the folder's lock; None where it cannot be had, which costs time only."""
    if folder in _given_up:
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    began = time.monotonic()
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if time.monotonic() - began > _MOST_SECONDS:
                    _given_up.add(folder)
                    raise
                time.sleep(_TURN_SECONDS)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):  # a file system without locks, or somebody who does not let go
            return None
        raise


def compiled_part(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """A function that compiled functions call: compiled with these, once for each combination of types.

    A constant is of the type of a variable here (a function of its own would be compiled again for each), and there
    is neither a wrapper nor a file for it, which is half of the time. Called from Python it is plain Python.
    """
    if function is None:
        return partial(compiled_part, **options)
    from numba.extending import register_jitable

    LOOPS.add(function)
    return register_jitable(no_cfunc_wrapper=True, **options)(function)


class Progress(Protocol):
    """Called with how far a stage is; `total` is None while nobody can know."""

    def __call__(self, stage: str, done: int, total: int | None) -> None: ...


def no_progress(stage: str, done: int, total: int | None) -> None:
    """A Progress that does nothing, for callers who do not look."""


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE = 0.3  # seconds in which the main thread should have noticed
_WAITING = ("threading.py", "selectors.py", "subprocess.py", "socket.py", "ssl.py")  # files of Python that wait in C
_ENOUGH = 0  # in the pipe: no more signals are expected


class Interrupted(KeyboardInterrupt):
    """Ctrl-C; `code` is the exit code that goes with it."""

    code = 128 + signal.SIGINT


class Terminated(Interrupted):
    """TERM."""

    code = 128 + signal.SIGTERM


_KINDS: dict[int, type[Interrupted]] = {signal.SIGINT: Interrupted, signal.SIGTERM: Terminated}


class Stopper:
    """Has somebody asked to stop?"""

    def __init__(self) -> None:
        self.signal = 0
        self.before: dict[int, Any] = {}

    @property
    def stopped(self) -> bool:
        return self.signal != 0

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Note the first signal; a second one is what it was before."""
        if self.signal and callable(self.before.get(number)):
            self.before[number](number, frame)
        self.signal = self.signal or number

    def check(self) -> None:
        """Stop here, if asked to."""
        if self.signal:
            raise _KINDS[self.signal]


@contextmanager
def stop_on_signal() -> Iterator[Stopper]:
    """Within, signals set the stopper's flag."""
    stopper = Stopper()
    with _handled_by(stopper.ask) as before:
        stopper.before = before
        yield stopper


@contextmanager
def interruptible() -> Iterator[None]:
    """The first signal raises Interrupted or Terminated in the main thread; a second one ends the process at once.

    A library that notices the signal itself and fails in its own words becomes the same exception. For programs, not
    for libraries: somebody else's process must not be ended.
    """
    asked: list[Interrupted] = []
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    wake, lost = threading.Event(), threading.Event()
    watcher = threading.Thread(target=_raise_in, args=(threading.get_ident(), reader, wake, lost), daemon=True)
    watcher.start()
    report = sys.unraisablehook

    def ask(number: int, frame: FrameType | None) -> None:
        if wake.is_set():
            wake.clear()
            raise _KINDS[number]
        asked.append(_KINDS[number]())
        os.write(writer, bytes([number]))

    def note(found: Any) -> None:
        """C code that cannot pass an exception on reports it and goes on."""
        if issubclass(found.exc_type, Interrupted):
            lost.set()
        else:
            report(found)

    def end() -> None:
        os.write(writer, bytes([_ENOUGH]))
        watcher.join()  # before handlers are others, which a signal that it sends would meet
        for number, previous in before.items():
            signal.signal(number, previous)
        sys.unraisablehook = report

    before: dict[int, Any] = {number: signal.signal(number, ask) for number in _SIGNALS}
    sys.unraisablehook = note
    try:
        yield
    except Exception as error:
        if asked:
            raise asked[0] from error
        raise
    finally:
        try:
            end()
        except Interrupted:  # raised here, it is too late: what was asked to stop is done
            end()
        os.close(reader)
        os.close(writer)


_CUT = b"memlens: a file was cut short while it was read; see that nobody writes to model and index, and run it again\n"


@contextmanager
def cut_files_in_words() -> Iterator[None]:
    """A mapped file that is shorter than it was kills who reads it by SIGBUS; say so in one line and exit with 2.

    The signal comes from the very instruction that reads, so nothing of the process can go on; for programs only.
    """
    import ctypes

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def end(_number: int) -> None:
        os.write(2, _CUT)
        os._exit(2)

    handle = ctypes.CDLL(None).signal
    handle.restype, handle.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    before = handle(signal.SIGBUS, ctypes.cast(end, ctypes.c_void_p))
    try:
        yield
    finally:
        handle(signal.SIGBUS, before)


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[dict[int, Any]]:
    """Signals go to `handler`; what they went to before comes back, and again at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return
    before: dict[int, Any] = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield before
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _is_inside(thread: int, function: str | None = None, file: str = Path(__file__).name) -> bool:
    """Is the innermost Python frame of a thread in this file (and function)?"""
    frame = sys._current_frames().get(thread)
    if frame is None or Path(frame.f_code.co_filename).name != file:
        return False
    return function is None or frame.f_code.co_name == function


def _is_starting_another(thread: int) -> bool:
    """Until a new thread runs, CPython knows it under the number of the one that starts it, and may confuse the two."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_name == "start" and Path(frame.f_code.co_filename).name == "threading.py":
            return True
        frame = frame.f_back
    return False


def _raise_in(thread: int, reader: int, wake: threading.Event, lost: threading.Event) -> None:
    """Wait for signals; the first is raised in `thread`, again where it got lost, the second ends the process.

    Raised between two bytecodes, the exception does not reach a thread that waits: that is woken by its signal.
    """
    from_signal = os.read(reader, 1)[0]
    if from_signal == _ENOUGH:
        return
    import ctypes

    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    lost.set()  # it has not been raised yet
    while True:
        if lost.is_set():
            lost.clear()
            # raised inside the handler, it would come out of whatever C code called that
            while _is_inside(thread, "ask") or _is_starting_another(thread):
                time.sleep(0.001)
            raise_in(ctypes.c_ulong(thread), ctypes.py_object(_KINDS[from_signal]))
        elif any(_is_inside(thread, file=name) for name in _WAITING):
            wake.set()
            signal.pthread_kill(thread, from_signal)
        if select.select([reader], [], [], _PATIENCE)[0]:
            break
    again = os.read(reader, 1)[0]
    if again == _ENOUGH:
        raise_in(ctypes.c_ulong(thread), None)  # too late: what was asked to stop is done
        return
    print("memlens: stopped at once; run the same command again to continue", file=sys.stderr, flush=True)
    os._exit(_KINDS[again].code)
