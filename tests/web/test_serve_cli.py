"""`memlens serve` prints its address, answers, and stops on a signal. Invalid options are one line."""

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from memlens.cli import main
from memlens.index.reader import Index
from memlens.web import app
from memlens.web.app import listen
from memlens.web.workbench import Workbench
from waiting import wait_until

COMMAND = [sys.executable, "-m", "memlens", "serve"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 0), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.sweep)]
)
def test_it_prints_its_address_opens_it_answers_and_stops(
    index_folder: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f"#!/bin/sh\necho $1 > {tmp_path}/opened.part && mv {tmp_path}/opened.part {tmp_path}/opened\n")
    browser.chmod(0o755)
    command = [*COMMAND, str(index_folder), "--port", "0", "--open"]
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "BROWSER": f"{browser} %s"}
    ran = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert ran.stdout is not None
        address = ran.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
        with urllib.request.urlopen(address, timeout=300) as answer:
            assert answer.status == 200 and b"as memories" in answer.read()
        wait_until((tmp_path / "opened").is_file, "the browser opens")
        assert (tmp_path / "opened").read_text().strip() == address
        ran.send_signal(number)
        assert ran.wait(300) == code
        assert "Traceback" not in (ran.stderr.read() if ran.stderr else "")
    finally:
        ran.kill()
        ran.communicate()


def test_invalid_options_are_one_line(index_folder: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    with listen("127.0.0.1", 0) as taken:
        for options, words in (
            (["--port", "70000"], "--port is 70000"),
            (["--host", "no such host"], "no such host"),
            (["--host", "192.0.2.7", "--port", "0"], "cannot listen on"),
            (["--port", taken.getsockname()[1]], "cannot listen on"),
            (["--compare", "nowhere"], "nowhere"),
            (["--model", "./nowhere"], "no such folder or file: './nowhere'"),
            (["--model", "no such model"], "not a valid Hub id"),
            (["--model", "bundled", "--no-model"], "--no-model"),
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


def test_the_model_is_the_one_the_index_was_scanned_from(
    index_folder: Path, own_index: Index, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[tuple[str, str]] = []

    def serve(workbench: Workbench, *_given: object) -> None:
        if workbench.status == "loading":
            workbench._load()
        served.append((workbench.status, workbench.status_text))
        workbench.close()

    monkeypatch.setattr(app, "serve", serve)
    assert main(["serve", str(index_folder)]) == 0 and main(["serve", str(index_folder), "--no-model"]) == 0
    manifest = own_index.manifest
    for source, message in (("./gone", "The model is no longer at './gone'"), ("bundled", "live pages do not work")):
        manifest.with_notes({"model": {**manifest.content["model"], "source": source}}).write(own_index.folder)
        capsys.readouterr()
        assert main(["serve", str(own_index.folder)]) == 0
        assert message in capsys.readouterr().err
    assert [status for status, _ in served] == ["ready", "none", "none", "failed"]
    assert "fingerprint" in served[-1][1]
