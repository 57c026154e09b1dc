"""A killed Ray driver leaves no workers, and a killed Ray agent causes a one-line error. Saved work is kept."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scale_helpers import TEXTS, Scans

from processes import Process, list_descendants, wait_until_ended
from waiting import PATIENCE, wait_until

pytestmark = pytest.mark.sweep

# The command line with a cluster of its own. It saves after every segment, and waits after a few.
PROGRAM = """
import sys
from memlens.cli import main
from memlens.index import build
from memlens.pool import RayPool
from memlens.scanner import scan
build.build_index.__kwdefaults__["save_seconds"] = 0.0
build.segment_size, scan.SAVE_RATIO = (lambda *plan: 2), 0
map_items = RayPool.map
def wait_after_some_items(*arguments):
    for number, result in enumerate(map_items(*arguments)):
        if number == 5: sys.stdin.readline()
        yield result
RayPool.map = wait_after_some_items
sys.exit(main(sys.argv[1:]))
"""
OPTIONS = "--executor ray --ray-address local --workers 1 --threads 1 --top 5 --batch-tokens 64"
AGENTS = ("raylet/raylet", "gcs/gcs_server")


def started(checkpoint: Path, out: Path) -> tuple[subprocess.Popen[str], list[Process]]:
    """Return a driver that has saved a part and waits until its stdin is closed, and all its processes."""
    command = [sys.executable, "-c", PROGRAM, "scan", str(checkpoint), *TEXTS, "-o", str(out), *OPTIONS.split()]
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    driver = subprocess.Popen(command, text=True, env=environment, **pipes)
    parts = out / "partial" / "parts"
    wait_until(lambda: driver.poll() is not None or any(parts.glob("*.npz")), "a part is saved")
    assert driver.poll() is None, driver.communicate()[1]
    processes = list_descendants(driver.pid)
    assert any("RayWorker" in process.command for process in processes)
    return driver, processes


def wait_until_gone(processes: list[Process]) -> None:
    """Ray's own helpers are left out: they end by themselves, up to a minute later."""
    wait_until_ended(process.number for process in processes if "Agent" not in process.command)


def test_a_driver_that_is_killed_leaves_nobody(small_checkpoint: Path, scans: Scans, tmp_path: Path) -> None:
    driver, processes = started(small_checkpoint, tmp_path)
    driver.kill()
    driver.communicate(timeout=PATIENCE)
    wait_until_gone(processes)
    scans.go_on(tmp_path)


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_that_is_killed_is_one_line(small_checkpoint: Path, scans: Scans, tmp_path: Path, agent: str) -> None:
    driver, processes = started(small_checkpoint, tmp_path)
    (lost,) = [process.number for process in processes if agent in process.command.split(" ")[0]]
    os.kill(lost, signal.SIGKILL)
    _, err = driver.communicate(timeout=PATIENCE)
    assert driver.returncode == 2, err
    lines = [line for line in err.splitlines() if line.startswith("memlens: ")]
    assert len(lines) == 1 and "has ended; completed work is kept" in lines[0]
    wait_until_gone(processes)
    scans.go_on(tmp_path)
