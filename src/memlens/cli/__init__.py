"""The command-line interface. app.py lists the commands and their modules.

    app        the list of commands, how they run, exit codes
    options    options that commands share, and options derived from settings
    screen     results on stdout, notes and progress on stderr, width and color

torch, pyarrow and duckdb are imported only when a command needs them.
"""

import os
import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Without arguments, it runs the command line of this process."""
    if arguments is None:
        _answer_early_signals()
        _prepare_process()
    from memlens.cli.app import run

    return run(arguments)


def _answer_early_signals() -> None:
    """On SIGINT or SIGTERM during imports or after the command, exit with one line instead of a traceback.

    No work is lost at these times. While a command runs, signals.interruptible handles the signals. While Python shuts
    down, the signals are ignored, because they would replace the exit code of the command.
    """
    import atexit

    def end(number: int, _frame: object) -> None:
        try:
            os.write(2, b"memlens: interrupted; run the same command again\n")
        finally:  # exit even if stderr is closed and writing to it fails
            os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # leave SIGINT ignored in background jobs
            signal.signal(number, end)
            atexit.register(signal.signal, number, signal.SIG_IGN)  # registered first, so it runs last


def _prepare_process() -> None:
    """Prepare the CLI process: passive OpenMP waits, /dev/null for closed streams, library warnings off.

    Warnings of torch and transformers do not help users of a command, and PYTHONWARNINGS=error would turn them into
    errors. Worker processes inherit the warning filter.
    """
    import atexit
    import warnings

    from memlens.process_setup import prepare_process

    prepare_process(is_server=sys.argv[1:2] == ["serve"] or "--serve" in sys.argv)
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # occupy closed descriptors, so that no opened file takes the place of a stream
    # hide messages of libraries such as DuckDB when the interpreter exits
    atexit.register(os.dup2, descriptor, 2)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8")
    warnings.simplefilter("ignore")
    sys.warnoptions[:] = ["ignore"]
    os.environ["PYTHONWARNINGS"] = "ignore"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # hide a line for every attempt to reach the Hub
    os.environ["RUST_BACKTRACE"] = "0"  # memlens reports a panic of the tokenizer in one line
