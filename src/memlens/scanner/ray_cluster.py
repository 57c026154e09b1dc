"""A Ray cluster: connecting, room for workers, lost agents, errors of workers; the only file that imports ray."""

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from uuid import uuid4

from memlens.errors import MemlensError, SettingError, WorkerError, needing

AGENT_SECONDS = 2.0  # between two looks whether Ray's agents are there, and for one look
START_SECONDS = 300.0  # so long no worker at all may be there


def import_ray() -> Any:
    with needing("ray", "--executor ray"):
        import ray
    return ray


def ensure_secret() -> None:
    """The secret of a cluster of one's own, kept for its processes where nobody can write to the home folder.

    Else Ray writes one to ~/.ray, and fails if it cannot.
    """
    if os.environ.keys() & {"RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
        return
    try:
        folder = Path("~/.ray").expanduser()
        if (folder / "auth_token").is_file():
            return
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError):  # no home at all
        os.environ["RAY_AUTH_TOKEN"] = uuid4().hex


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Ray, connected to the cluster; a connection that was there before is used and left as it is."""
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    if address in (None, "local"):
        ensure_secret()
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=True)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WorkerError(
            f"the Ray cluster {address or ''} cannot be reached ({reason}); check --ray-address"
        ) from error
    try:
        yield ray
    except ConnectionError as error:  # a call met the agent's end before Ray noticed it or its socket closed
        raise _ended(_lost_agent(ray) or "connection") from error
    finally:
        if not _lost_agent(ray):  # else it would wait for what is gone, and Ray would end this process meanwhile
            with suppress(ConnectionError):  # it ended just now: what was to be done is done
                ray.shutdown()


def refuse_lost_agent(ray: Any) -> None:
    """Ray ends a process whose agents are gone, within seconds and without a word: say it before."""
    if lost := _lost_agent(ray):
        raise _ended(lost)


def _ended(lost: str) -> WorkerError:
    return WorkerError(
        f"Ray's {lost} has ended; what was handed over is kept: start the cluster again, then the same command"
    )


def _lost_agent(ray: Any) -> str:
    """The agent of Ray, of those this process talks to, that does not listen any more; empty if all do."""
    node = getattr(ray._private.worker, "_global_node", None)
    if node is None:  # not connected, or by Ray's client, which has no agent here
        return ""
    host, _, port = str(node.gcs_address).rpartition(":")
    for name, family, address in (
        ("agent on this machine (raylet)", socket.AF_UNIX, node.raylet_socket_name),
        ("head (gcs_server)", socket.AF_INET6 if ":" in host else socket.AF_INET, (host.strip("[]"), int(port))),
    ):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(AGENT_SECONDS)
            try:
                probe.connect(address)
            except (ConnectionRefusedError, FileNotFoundError):
                return name
            except OSError:
                continue  # busy or far away: not known to be gone
    return ""


def end_all(ray: Any, handles: Iterable[Any]) -> None:
    """End actors; those of a lost agent end by themselves."""
    if not _lost_agent(ray):
        for handle in handles:
            ray.kill(handle)


def actor_class(ray: Any, kind: type, threads: int, gpus: float) -> Any:
    cpus = 0 if gpus else threads
    return ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0, scheduling_strategy="SPREAD")(kind)


def room_for(ray: Any, threads: int, gpus: float) -> int:
    """The number of workers that the cluster has room for, one at least."""
    resources = ray.cluster_resources()
    room = resources.get("GPU", 0) / gpus if gpus else resources.get("CPU", 1) / threads
    if gpus and room < 1:
        raise SettingError(f"--gpus-per-worker is {gpus}, but the Ray cluster has {resources.get('GPU', 0):g} GPUs")
    return max(1, int(room))


def worker_error(error: Any) -> Exception:
    """The error to raise for one of a worker: its refusal as the same error, anything else as a bug."""
    cause = error.cause
    if isinstance(cause, MemlensError):
        return type(cause)(str(cause))
    if isinstance(cause, MemoryError):
        return WorkerError("a Ray worker has not enough memory; try fewer workers per node or smaller --batch-tokens")
    return RuntimeError(f"a Ray worker failed:\n{error}")
