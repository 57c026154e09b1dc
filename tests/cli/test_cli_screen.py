"""Output on a terminal, in a pipe and in a file: harmless, plain where nobody looks, and silent where it should be."""

import io
import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from cli_helpers import Paths, Run
from rich.console import Console

import memlens
from memlens import text
from memlens.cli import app as outcome, screen
from memlens.cli.app import VERBS
from memlens.index.reader import Index
from memlens.models.load import load
from memlens.testing import save_tiny

EVIL = "The \x1b[31mred\x1b[0m river\tran [bold]fast[/bold] to\x07 the \u202esea \x9b5m :smile: <b>now</b>."


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:

    folder = tmp_path_factory.mktemp("evil")
    (folder / "evil.txt").write_text(EVIL + "\n", encoding="utf-8")
    model = save_tiny(folder / "model", "llama", max_position_embeddings=256)  # reads the whole line
    memlens.scan(model, folder / "evil.txt", out=folder / "index", unit="line", threads=1)
    return folder / "index"


def on_a_terminal(columns: int, *arguments: object, **environment: str) -> str:
    """The output of `memlens` on a terminal of that width."""
    leader, follower = pty.openpty()
    variables = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")}
    variables |= {"COLUMNS": str(columns), "TERM": "xterm-256color", **environment}
    command = [sys.executable, "-m", "memlens", *map(str, arguments)]
    written = b""
    with subprocess.Popen(command, stdout=follower, stderr=follower, stdin=follower, env=variables) as process:
        os.close(follower)
        with suppress(OSError):  # how a terminal says that the other side is gone
            while chunk := os.read(leader, 4096):
                written += chunk
    os.close(leader)
    assert process.returncode == 0, written
    return written.decode("utf-8")


def without_styles(written: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", written)


@pytest.mark.parametrize("columns", [60, *(pytest.param(one, marks=pytest.mark.sweep) for one in (80, 120))])
def test_on_a_terminal_lines_fit_and_nothing_of_the_corpus_acts(evil: Path, columns: int) -> None:
    found = without_styles(on_a_terminal(columns, "search", evil, "now", "--limit", 50))
    assert "now" in found and ("…" in found or columns > 60)
    shown = found + without_styles(on_a_terminal(columns, "show", evil, "L1N3", "--top", 50))
    assert "\x1b" not in shown and "\x07" not in shown and "\u202e" not in shown and "\x9b" not in shown
    table = found.splitlines() + shown.split("triggers", 1)[1].splitlines()[1:]
    assert max(len(line) for line in table) <= columns


def test_a_terminal_gets_styles_and_no_marks_and_no_color_gets_marks_and_no_styles(made: Paths) -> None:
    styled = on_a_terminal(80, "show", made["plain"], "L0N1")
    plain = on_a_terminal(80, "show", made["plain"], "L0N1", NO_COLOR="1")
    assert "\x1b[" in styled and "«" not in styled
    assert "\x1b[" not in plain and "«" in plain


def test_in_a_pipe_lines_are_whole_plain_and_shown_as_text(run: Run, evil: Path) -> None:
    index = Index(evil)
    memory = next(f"L0N{n}" for n in range(40) if index.triggers(f"L0N{n}"))
    shown = run("show", evil, memory).out
    trigger = index.triggers(memory)[0]
    assert text.visible(trigger.before) + "«" in shown
    assert "\x1b" not in shown and not any(line != line.rstrip() for line in shown.splitlines())
    found = run("search", evil, "[bold]fast[/bold]").out
    assert "[bold]fast[/bold]" in found


def test_json_holds_the_text_itself_but_only_ascii(run: Run, evil: Path) -> None:
    out = run("search", evil, "red", "--json").out
    assert out.isascii() and "\x1b" not in out
    assert EVIL.startswith(json.loads(out)["found"][0]["trigger"]["before"])


def test_a_reader_that_leaves_early_is_no_error(made: Paths) -> None:
    for verb in (["export", made["plain"]], ["show", made["plain"], "L0N0"], ["show", made["plain"], "L0N0", "--json"]):
        command = [sys.executable, "-m", "memlens", *map(str, verb)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.close()
            complaints = process.stderr.read()
        assert process.returncode == 0
        assert b"Error" not in complaints and b"Traceback" not in complaints


def test_a_bug_shows_its_traceback_and_asks_to_be_reported(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise RuntimeError("this cannot be")

    assert outcome.run_guarded(broken) == 1
    message = capsys.readouterr().err
    assert "Traceback" in message and "this cannot be" in message and message.strip().endswith("the lines above")


def test_help_names_every_verb_and_only_those_and_no_python_types(run: Run) -> None:
    ran = run("--help")
    listed = [line.split()[0] for line in ran.out.splitlines() if re.match(r"  [a-z]", line)]
    assert ran.code == 0 and listed == list(VERBS) and run().out == ran.out
    for verb in VERBS:
        ran = run(verb, "--help")
        assert ran.code == 0 and not re.search(r"<\w+(\[\w+\])?>", ran.out), ran.out
    assert run("--version").out == f"memlens {memlens.__version__}\n"


def test_notebooks_show_escaped_html(evil: Path, models: Paths) -> None:
    index = Index(evil)
    memory = next(f"L0N{n}" for n in range(40) if len(index.triggers(f"L0N{n}")))
    triggers = index.triggers(memory)
    triggers += [triggers[0].__class__(1, 2.0, triggers[0].prefix, "<script>", "<b>", "&", None, None)]
    shown = triggers._repr_html_()
    assert "&lt;script&gt;" in shown and "<script>" not in shown
    assert "<td>120</td>" in index._repr_html_()
    assert "gated silu" in load(models["gated"])._repr_html_()


def test_the_speed_of_reading_is_told_at_the_end_of_the_text_where_there_is_much(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(screen.time, "monotonic", lambda: float(next(clock)))
    for read, verbose in ((5_000_000, False), (5_000, True), (5_000, False)):
        with screen.ProgressBar(screen.Screen(verbose=verbose)) as progress:
            for stage, done in (("corpus", 0), ("corpus", read // 2), ("corpus", read), ("scan", 0)):
                progress(stage, done, 9 if stage == "scan" else None)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("read ")]
    assert lines == ["read 5.0 MB of text, 1.67 MB/s", "read 0.0 MB of text, 0.00 MB/s"]


def test_the_time_left_follows_from_all_completed_work_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(screen.time, "monotonic", lambda: now[0])
    shown = screen.Screen()
    shown.err = Console(file=io.StringIO(), force_terminal=True, width=120)
    with screen.ProgressBar(shown) as progress:
        progress("scan", 100, 1000)  # a resumed scan: 100 tokens were read before
        for now[0], done, expected in (
            (1.0, 200, "100 tokens/s"),  # too early to estimate
            (10.0, 300, "20 tokens/s, 35 s left in this step"),
            (20.0, 1000, "45 tokens/s"),
        ):
            progress("scan", done, 1000)
            assert progress._bar is not None and progress._bar.tasks[0].fields["work"] == expected
