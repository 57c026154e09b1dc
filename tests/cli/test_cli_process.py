"""`memlens` as a process: closed and full streams, odd widths, warnings that are errors; nothing but its own lines."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from cli_helpers import Run

COMMAND = [sys.executable, "-m", "memlens"]
SWEEP = partial(pytest.param, marks=pytest.mark.sweep)


def shell(line: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run memlens in a shell; `$@` in the line stands for the whole command."""
    words = [*COMMAND, *map(str, arguments)]
    return subprocess.run(
        ["sh", "-c", line, "sh", *words], capture_output=True, text=True, env={**os.environ, **environment}, timeout=600
    )


@pytest.mark.parametrize("closed", [">&-", "2>&-", SWEEP(">&- 2>&-"), SWEEP("<&- >&- 2>&-")])
def test_closed_streams_are_no_crash(made: dict[str, Path], closed: str) -> None:
    shown = shell(f'"$@" {closed}', "show", made["plain"], "L0N0", "-q")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert bool(shown.stdout) == (closed == "2>&-")
    refused = shell(f'"$@" {closed}', "show", made["plain"], "L9N0")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == (1 if closed == ">&-" else 0)


EARLY = """
import os, signal, sys

class Interrupts:  # whoever imports this module is interrupted
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[2]:
            os.kill(os.getpid(), int(sys.argv[1]))

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
from memlens.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["memlens.signals", SWEEP("memlens.cli.app")])
@pytest.mark.parametrize("number", [signal.SIGINT, SWEEP(signal.SIGTERM)])
def test_a_signal_before_the_command_has_begun_is_one_line(number: int, module: str) -> None:
    arguments = [sys.executable, "-c", EARLY, str(int(number)), module]
    ran = subprocess.run(arguments, capture_output=True, text=True, timeout=600)
    message = "memlens: interrupted; run the same command again\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == (128 + number, "", message)


LATE = """
import os, sys
from memlens.cli import main

class Late:  # deleted after Python has removed its signal handlers
    def __del__(self, kill=os.kill, process=os.getpid(), number=int(sys.argv[1])):
        kill(process, number)

late = Late()
sys.argv[1:] = ["--version"]
sys.exit(main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, SWEEP(signal.SIGTERM)])
def test_a_signal_while_python_shuts_down_does_not_change_the_exit_code(number: int) -> None:
    ran = subprocess.run([sys.executable, "-c", LATE, str(int(number))], capture_output=True, text=True, timeout=600)
    assert (ran.returncode, ran.stderr) == (0, "") and ran.stdout.startswith("memlens ")


@pytest.mark.parametrize(("arguments", "option"), [(("export", "{}"), "-o"), (("annotate", "{}", "export"), "--file")])
def test_an_export_to_a_closed_stdout_is_refused(
    made: dict[str, Path], arguments: tuple[str, ...], option: str
) -> None:
    ran = shell('"$@" >&-', *(word.format(made["plain"]) for word in arguments))
    message = f"memlens: stdout is closed; name an output file with {option}\n"
    assert (ran.returncode, ran.stderr) == (2, message)


@pytest.mark.parametrize("arguments", [("show", "{}", "L0N0"), SWEEP(("export", "{}")), SWEEP(("--help",))])
def test_a_full_disk_behind_stdout_is_one_line(made: dict[str, Path], arguments: tuple[str, ...]) -> None:
    ran = shell('"$@" > /dev/full', *(word.format(made["plain"]) for word in arguments))
    assert ran.returncode == 2
    assert ran.stderr.startswith("memlens: ") and ran.stderr.count("\n") == 1 and "No space left" in ran.stderr


def test_warnings_that_are_errors_and_libraries_that_count_do_not_disturb_a_command(made: dict[str, Path]) -> None:
    ran = shell('"$@"', "trace", made["plain"], "The river", "--top", 1, PYTHONWARNINGS="error")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "river" in ran.stdout


@pytest.mark.parametrize("columns", ["0", "1", "²", "-5", "99999999999999999999", "wide"])
def test_a_width_that_no_terminal_has_is_passed_over(
    run: Run, made: dict[str, Path], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    usual = run("show", made["plain"], "L0N0").out
    monkeypatch.setenv("COLUMNS", columns)
    assert run("show", made["plain"], "L0N0").out == usual != ""
    monkeypatch.setenv("COLUMNS", columns)
    assert "Usage" in run("--help").out


def test_the_shell_completes_commands_options_choices_and_paths() -> None:
    def complete(*words: str) -> list[str]:
        asked = {
            "_MEMLENS_COMPLETE": "bash_complete",
            "COMP_WORDS": shlex.join(words),
            "COMP_CWORD": str(len(words) - 1),
        }
        command = [sys.executable, "-m", "memlens"]
        return subprocess.run(command, env=os.environ | asked, capture_output=True, text=True).stdout.split()

    assert complete("memlens", "exp") == ["plain,experiment", "plain,export"]
    assert complete("memlens", "show", "index", "--ef") == ["plain,--effect"]
    assert complete("memlens", "search", "index", "--in", "p") == ["plain,patterns"]
    assert complete("memlens", "compare", "index", "other", "--by", "v") == ["plain,values"]
    assert complete("memlens", "annotate", "index", "verd") == ["plain,verdicts"]
    assert complete("memlens", "show", "my") == complete("memlens", "scan", "bundled", "my") == ["file,my"]
    script = subprocess.run([sys.executable, "-m", "memlens", "--completion", "bash"], capture_output=True, text=True)
    assert script.returncode == 0 and "_MEMLENS_COMPLETE=bash_complete" in script.stdout
    assert subprocess.run(["bash", "-n"], input=script.stdout, text=True).returncode == 0


@pytest.mark.sweep
def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path) -> None:
    unreachable = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    ran = shell('"$@"', "info", "somebody/some-model", **unreachable)
    assert ran.returncode == 2 and ran.stdout == "" and ran.stderr.count("\n") == 1
