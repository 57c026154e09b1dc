"""`memlens serve` as a command: it prints its address, answers, and stops when told; what cannot be is one line."""

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

from memlens.web.app import listen

COMMAND = [sys.executable, "-m", "memlens", "serve"]


def test_it_prints_its_address_answers_and_stops(index_folder: Path) -> None:
    command, env = [*COMMAND, str(index_folder), "--port", "0"], {**os.environ, "PYTHONUNBUFFERED": "1"}
    ran = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
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


def test_what_cannot_be_served_is_one_line(index_folder: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    with listen("127.0.0.1", 0) as taken:
        for options, words in (
            (["--port", "70000"], "--port is 70000"),
            (["--host", "no such host"], "no such host"),
            (["--host", "192.0.2.7", "--port", "0"], "cannot be had"),
            (["--port", taken.getsockname()[1]], "cannot be had"),
            (["--compare", "nowhere"], "nowhere"),
            (["--model", "./nowhere"], "no such folder or file: './nowhere'"),
            (["--model", "no such model"], "no possible Hub id"),
        ):
            assert words in refused("serve", index_folder, *options)
    assert "is not an index" in refused("serve", tmp_path)


def test_looking_needs_no_torch(index_folder: Path) -> None:
    code = (
        "import sys; from memlens.web.app import create_app; from memlens.web.workbench import Workbench; "
        "from fastapi.testclient import TestClient; "
        "client = TestClient(create_app(Workbench(sys.argv[1])), base_url='http://localhost'); "
        "assert client.get('/').status_code == client.get('/search?q=the').status_code == 200; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(index_folder)], check=True, capture_output=True)
