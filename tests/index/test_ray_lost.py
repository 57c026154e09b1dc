"""A killed Ray driver leaves no workers, and a killed Ray agent causes a one-line error. Saved work is kept."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from scale_helpers import TEXTS, Scans, is_alive

from waiting import PATIENCE, wait_until

pytestmark = pytest.mark.sweep

# The command line with a cluster of its own, which saves all the time.
PROGRAM = """
import sys
from memlens.cli import main
from memlens.index import build
from memlens.scanner import scan
build.build_index.__kwdefaults__["save_seconds"] = 0.0
build.segment_size, scan.SAVE_RATIO = (lambda *plan: 2), 0
sys.exit(main(sys.argv[1:]))
"""
AGENTS = ("raylet/raylet", "gcs/gcs_server")


def descendants(process: int) -> dict[int, str]:
    """Return all descendants of a process with their command lines."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
        children.setdefault(parent, []).append(int(status.parent.name))
    found: dict[int, str] = {}
    left = [process]
    while left:
        for child in children.get(left.pop(), []):
            left.append(child)
            try:
                found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
    return found


def started(checkpoint: Path, out: Path) -> tuple[subprocess.Popen[str], dict[int, str]]:
    """Return a driver that has saved a part and is still running, and all its processes."""
    options = [
        "--executor",
        "ray",
        "--ray-address",
        "local",
        "--workers",
        "1",
        "--threads",
        "1",
        "--top",
        "5",
        "--batch-tokens",
        "64",
    ]
    command = [sys.executable, "-c", PROGRAM, "scan", str(checkpoint), *TEXTS, "-o", str(out), *options]
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    parts = out / "partial" / "parts"
    wait_until(lambda: driver.poll() is not None or any(parts.glob("*.npz")), "a part is saved")
    assert driver.poll() is None, driver.communicate()[1]
    processes = descendants(driver.pid)
    assert any("RayWorker" in command for command in processes.values())
    return driver, processes


def wait_until_gone(processes: dict[int, str]) -> None:
    """Ray's own helpers are left out: they end by themselves, up to a minute later."""
    numbers = [number for number, command in processes.items() if "Agent" not in command]
    wait_until(lambda: not any(map(is_alive, numbers)), "the processes of the cluster end")


def test_a_driver_that_is_killed_leaves_nobody(small_checkpoint: Path, scans: Scans, tmp_path: Path) -> None:
    driver, processes = started(small_checkpoint, tmp_path)
    driver.kill()
    driver.communicate(timeout=PATIENCE)
    wait_until_gone(processes)
    scans.go_on(tmp_path)


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_that_is_killed_is_one_line(small_checkpoint: Path, scans: Scans, tmp_path: Path, agent: str) -> None:
    driver, processes = started(small_checkpoint, tmp_path)
    (lost,) = [number for number, command in processes.items() if agent in command.split(" ")[0]]
    os.kill(lost, signal.SIGKILL)
    _, err = driver.communicate(timeout=PATIENCE)
    assert driver.returncode == 2, err
    lines = [line for line in err.splitlines() if line.startswith("memlens: ")]
    assert len(lines) == 1 and "has ended; completed work is kept" in lines[0]
    wait_until_gone(processes)
    scans.go_on(tmp_path)
