"""`memlens serve` as a command: it prints its address, answers, and stops when told; what cannot be is one line."""

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from memlens.cli import main
from memlens.web.app import listen

COMMAND = [sys.executable, "-m", "memlens", "serve"]


def test_it_prints_its_address_answers_and_stops(index_folder: Path) -> None:
    ran = subprocess.Popen(
        [*COMMAND, str(index_folder), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert ran.stdout is not None
        address = ran.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
        with urllib.request.urlopen(address, timeout=60) as answer:
            assert answer.status == 200 and b"as memories" in answer.read()
        ran.send_signal(signal.SIGINT)
        assert ran.wait(30) == 0
        assert "Traceback" not in (ran.stderr.read() if ran.stderr else "")
    finally:
        ran.kill()
        ran.communicate()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "70000"], "--port is 70000"),
        (["--host", "no such host"], "no such host"),
        (["--host", "192.0.2.7", "--port", "0"], "cannot be had"),
        (["--compare", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    index_folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["serve", str(index_folder), *options]) == 2
    said = capsys.readouterr()
    assert words in said.err and said.out == "" and said.err.count("\n") == 1


def test_a_port_that_is_taken_and_a_folder_that_is_no_index_are_one_line(
    index_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with listen("127.0.0.1", 0) as taken:
        assert main(["serve", str(index_folder), "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot be had" in capsys.readouterr().err
    assert main(["serve", str(tmp_path)]) == 2
    assert "is not an index" in capsys.readouterr().err


def test_looking_needs_no_torch(index_folder: Path) -> None:
    code = (
        "import sys; from memlens.web.app import create_app; from memlens.web.workbench import Workbench; "
        "from fastapi.testclient import TestClient; "
        "client = TestClient(create_app(Workbench(sys.argv[1])), base_url='http://localhost'); "
        "assert client.get('/').status_code == client.get('/search?q=the').status_code == 200; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(index_folder)], check=True, capture_output=True)
