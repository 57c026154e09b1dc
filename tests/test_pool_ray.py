"""The Ray backend without a cluster: lost workers, copies of the value, and connecting. Ray itself is a stand-in."""

import socket
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from memlens import pool as pool_module
from memlens.errors import ModelError, SettingError, WorkerError
from memlens.pool import PickledSource, RayPool, RayWorker, connect_ray, versions


class RayError(Exception):
    pass


class RayTaskError(RayError):
    """An exception that a worker raised."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class Call:
    """A pending call of a worker's method."""

    def __init__(self, reply: Callable[[], Any], is_ready: bool = True) -> None:
        self.reply, self.is_ready = reply, is_ready


class Ray:
    """A connected cluster with room for two workers. Workers that start are numbered."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
    _private = SimpleNamespace(
        worker=SimpleNamespace(), services=SimpleNamespace(canonicalize_bootstrap_address=lambda address: None)
    )

    def __init__(
        self,
        apply: Callable[[int, Any], Any] = lambda number, item: item * item,
        start: Callable[[int, Any], Any] = lambda number, order: None,
        slow: frozenset[int] = frozenset(),
    ) -> None:
        self.apply, self.start, self.slow = apply, start, slow
        self.started = 0
        self.killed: list[int] = []

    def is_initialized(self) -> bool:
        return True

    def put(self, content: Any) -> Any:
        return content

    def get(self, call: Call) -> Any:
        return call.reply()

    def wait(self, calls: list[Call], num_returns: int, timeout: float) -> tuple[list[Call], list[Call]]:
        return [call for call in calls if call.is_ready], []

    def kill(self, worker: Any) -> None:
        self.killed.append(worker.number)

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2}

    def remote(self, **options: Any) -> Callable[[type], Any]:
        return lambda kind: SimpleNamespace(remote=self._start_worker)

    def _start_worker(self, expected: tuple[str, ...]) -> Any:
        number, self.started = self.started, self.started + 1
        return SimpleNamespace(
            number=number,
            start=SimpleNamespace(
                remote=lambda order: Call(lambda: self.start(number, order), number not in self.slow)
            ),
            apply=SimpleNamespace(remote=lambda item: Call(lambda: self.apply(number, item))),
        )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Any]]]:
    """Return a function that maps items on a stand-in. Asserts at the end that each worker was killed once."""
    clusters: list[Ray] = []

    def map_items(cluster: Ray, items: int, workers: int = 2) -> list[Any]:
        clusters.append(cluster)
        monkeypatch.setattr(pool_module, "import_ray", lambda: cluster)
        return list(RayPool(PickledSource(None), workers, 1).map(lambda value, item: item, range(items)))

    yield map_items
    for cluster in clusters:
        assert sorted(cluster.killed) == list(range(cluster.started))


def lose(times: int, only: int | None = None) -> Callable[[int, Any], Any]:
    """Return a function that loses the worker of each item, or of one item, several times."""
    losses: Counter[Any] = Counter()

    def apply(number: int, item: Any) -> Any:
        if only in (None, item) and losses[item] < times:
            losses[item] += 1
            raise RayError
        return item * item

    return apply


def test_an_item_is_retried_three_times(run) -> None:
    assert run(Ray(lose(3)), 5) == [0, 1, 4, 9, 16]


def test_an_item_is_given_up_after_the_fourth_loss(run) -> None:
    with pytest.raises(WorkerError, match=r"a Ray worker was lost \(RayError\) 4 times in a row on the same work"):
        run(Ray(lose(4, only=3)), 5)


def test_a_worker_that_does_not_start_is_not_waited_for(run) -> None:
    cluster = Ray(lambda number, item: (number, item), slow=frozenset({0}))
    assert run(cluster, 7) == [(1, item) for item in range(7)]


def test_a_cluster_without_room_is_one_line(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "START_SECONDS", 0.05)
    with pytest.raises(WorkerError, match="no Ray worker has started for 0 seconds; the cluster has no room"):
        run(Ray(slow=frozenset({0, 1})), 1)


@pytest.mark.parametrize("lost", [3, 9])
def test_workers_that_are_lost_while_they_start_are_replaced_three_times(run, lost: int) -> None:
    def start(number: int, order: Any) -> Any:
        if number < lost:
            raise RayError

    if lost == 3:
        assert run(Ray(start=start), 3, workers=1) == [0, 1, 4]
    else:
        with pytest.raises(WorkerError, match="while starting, 4 times in a row"):
            run(Ray(start=start), 3, workers=1)


def test_a_node_that_cannot_load_the_value_gets_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[str] = []

    class Source:
        value = None

        def loader(self, *, copy: bool = False, gpus: float | None = None) -> Any:
            return f"copy={copy} gpus={gpus}"

    def start(number: int, order: Any) -> Any:
        orders.append("copy" if b"copy=True" in order else "source")
        if orders[-1] == "source":
            raise RayTaskError(pool_module._LoadError(ModelError("not here")))

    monkeypatch.setattr(pool_module, "import_ray", lambda: Ray(start=start))
    assert list(RayPool(Source(), 1, 1).map(lambda value, item: item, range(3))) == [0, 1, 4]
    assert orders == ["source", "copy"]


def test_a_node_with_other_versions_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "prepare_process", lambda: None)
    message = "but the driver has memlens 0.0.1 with torch 1.0 and transformers 2.0; install the same"
    with pytest.raises(WorkerError, match=message):
        RayWorker(("0.0.1", "1.0", "2.0")).start(b"")
    assert len(versions()) == 3


def test_more_gpus_than_the_cluster_has_are_rejected() -> None:
    with pytest.raises(SettingError, match=r"--gpus-per-worker is 1\.0, but the Ray cluster has 0 GPUs"):
        pool_module.room_for_workers(Ray(), 1, 1.0)


class Disconnected(Ray):
    """A Ray that records the address of the connection."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.error = error

    def is_initialized(self) -> bool:
        return False

    def init(self, address: str, **options: Any) -> None:
        self.addresses.append(address)
        if self.error is not None:
            raise self.error

    def shutdown(self) -> None:
        pass


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that refuses connections. It stays bound, so that no other process listens there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield int(probe.getsockname()[1])


def connect(monkeypatch: pytest.MonkeyPatch, ray: Disconnected, address: str | None) -> list[str]:
    monkeypatch.setattr(pool_module, "import_ray", lambda: ray)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of this test")
    with connect_ray(address):
        return ray.addresses


def test_without_an_address_a_cluster_is_started_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert connect(monkeypatch, Disconnected(), None) == ["local"], "Ray would wait for a cluster that is gone"


def test_the_address_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert connect(monkeypatch, Disconnected(), None) == [address]


def test_a_cluster_that_does_not_answer_is_one_line(monkeypatch, closed_port: int, capsys) -> None:
    monkeypatch.setattr(pool_module, "CONNECT_SECONDS", 0.5)
    with pytest.raises(
        WorkerError, match=rf"no Ray cluster responds at 127\.0\.0\.1:{closed_port} \(Connection refused"
    ):
        connect(monkeypatch, Disconnected(), f"127.0.0.1:{closed_port}")
    assert "waiting up to 0 s for the Ray cluster" in capsys.readouterr().err


def test_the_last_cluster_of_this_machine_is_not_waited_for_if_it_is_gone(monkeypatch, closed_port, tmp_path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{closed_port}")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(pool_module, "CONNECT_SECONDS", 0.5)
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)  # ignore clusters of other test processes
    with pytest.raises(WorkerError, match=rf"no Ray cluster responds at [\d.]+:{closed_port} "), connect_ray("auto"):
        pass


@pytest.mark.parametrize("error", [RuntimeError("Failed to start raylet\nlogs"), AssertionError(), OSError("gone")])
def test_an_agent_that_is_lost_during_startup_is_one_line(monkeypatch, error: Exception) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(
        WorkerError, match=r"^no Ray cluster can be started here \([^\n]*\); run the same command again$"
    ):
        connect(monkeypatch, Disconnected(error), None)


@pytest.mark.parametrize("error", [ConnectionResetError(), OSError("Broken pipe")])
def test_a_call_that_finds_no_agent_is_one_line(monkeypatch, error: Exception) -> None:
    monkeypatch.setattr(pool_module, "import_ray", Disconnected)
    with pytest.raises(WorkerError, match="Ray's connection has ended; completed work is kept"), connect_ray("local"):
        raise error
