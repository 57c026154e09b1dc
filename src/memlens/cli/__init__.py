"""The command line: it parses, calls and prints. Verbs are listed in app.py, each in the file of its name.

    app        the verbs, how they are run, exit codes
    options    options that verbs share, and options made from settings
    screen     results on stdout, notes and progress on stderr; width and colour

Nothing here imports torch, pyarrow or duckdb before a verb needs them.
"""

import os
import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (default: the process's own arguments) and give its exit code."""
    if arguments is None:
        _answer_early_signals()
        _prepare_process()
    from memlens.cli.app import run

    return run(arguments)


def _answer_early_signals() -> None:
    """Ctrl-C and TERM while modules are imported, and when all is done: one line and the exit code, no traceback.

    Nothing is under way then that could be lost; while a verb runs, signals.interruptible handles the signals.
    """

    def end(number: int, _frame: object) -> None:
        try:
            os.write(2, b"memlens: interrupted; run the same command again\n")
        finally:  # also where stderr is closed
            os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as of a job in the background
            signal.signal(number, end)


def _prepare_process() -> None:
    """A process of its own: threads rest while they wait, closed streams lead nowhere, and libraries warn nobody.

    What a warning of torch or transformers says is not for the person who typed a command, and PYTHONWARNINGS=error
    would make a crash of it; here as in the worker processes that are started later.
    """
    import atexit
    import warnings

    from memlens.process_setup import prepare_process

    prepare_process(is_server=sys.argv[1:2] == ["serve"] or "--serve" in sys.argv)
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # takes the place of a closed stream, which else the next file would have: prints would land in it
    # When Python ends, what libraries report of objects that are still held (DuckDB does) is for nobody.
    atexit.register(os.dup2, descriptor, 2)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8")
    warnings.simplefilter("ignore")
    sys.warnoptions[:] = ["ignore"]
    os.environ["PYTHONWARNINGS"] = "ignore"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
