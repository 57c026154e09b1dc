"""An ordered map over items with three backends: this process, local worker processes (loky), or a Ray cluster.

    for result in pool.map(function, items):
        ...

1. `function(value, item)` is called once per item. `value` is an object that every worker needs, such as the model.
   A `Source` provides the object itself for this process and a picklable loader for workers.
2. Results are in the order of the items. Only a few items and results are in memory at a time.
3. A map starts workers and ends them when all results have arrived. The item of a worker that dies is retried up to
   RETRIES times.
4. If a worker raises an exception of memlens.errors, the map raises it unchanged. Any other exception is a bug, and the
   map raises a RuntimeError that contains the worker's traceback.
5. Workers ignore SIGINT and SIGTERM, which the driver handles, and exit within a second if the driver dies.

Functions and items must be picklable. A result must depend on the function, the value and the item only, so that it is
the same on every backend. This is the only module that imports loky and ray.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing.resource_tracker
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import chain, islice
from multiprocessing import current_process
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Protocol, TypeVar
from uuid import uuid4

from memlens.errors import MemlensError, RayAgentError, SettingError, WorkerError, needing
from memlens.process_setup import prepare_process

Item = TypeVar("Item")
Result = TypeVar("Result")

RETRIES = 3  # maximum number of retries of an item whose worker died, and of starting workers
POLL_SECONDS = 0.2  # time between checks for a stop request
AHEAD = 2  # number of items in memory beyond one per worker
_MOST_CALLS = 2  # number of items that a Ray worker has at a time
AGENT_SECONDS = 2.0  # time limit for checking Ray's agents
CHECK_SECONDS = 0.5  # time between checks of Ray's agents; without its agents, Ray ends this process within seconds
CONNECT_SECONDS = 30.0  # time limit for connecting to an existing Ray cluster
START_SECONDS = 300.0  # time limit for the start of the first Ray worker

_END = object()


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Source(Protocol):
    """Provides an object that every worker needs."""

    value: Any  # the object in this process

    def loader(self, *, copy: bool = False, gpus: float | None = None) -> Callable[[int], Any] | None:
        """Return a picklable function that creates the object in a worker, or None if that is impossible.

        The function takes the number of the worker.

        Args:
            copy: Send a copy of the object, because workers could not load it from its source.
            gpus: Number of GPUs per worker on a cluster; None for workers on this machine.
        """


class PickledSource:
    """A source that sends workers a pickled copy of the object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def loader(self, *, copy: bool = False, gpus: float | None = None) -> Callable[[int], Any] | None:
        import cloudpickle

        try:
            return None if copy else _Unpickler(cloudpickle.dumps(self.value))
        except Exception:  # cloudpickle may raise any exception
            return None


@dataclass(frozen=True)
class _Unpickler:
    content: bytes

    def __call__(self, number: int) -> Any:
        return pickle.loads(self.content)


class Pool(Protocol):
    """A backend that applies functions to items."""

    def map(self, function: Callable[[Any, Item], Result], items: Iterable[Item]) -> Generator[Result, None, None]:
        """Yield `function(value, item)` for every item, in order."""


class SerialPool:
    """A pool that applies functions in this process, one item after another."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def map(self, function: Callable[[Any, Item], Result], items: Iterable[Item]) -> Generator[Result, None, None]:
        for item in items:
            yield function(self.value, item)


# --- workers ----------------------------------------------------------------------------------------------------------


class Worker:
    """Loads the value and applies the function to items, in a worker process or as a Ray actor.

    It raises only exceptions that the driver can unpickle.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.function: Callable[[Any, Any], Any] | None = None
        self.value: Any = None

    def start(self, order: bytes) -> None:
        """Load the value. Raises _LoadError if that fails."""
        try:
            loader, self.function = pickle.loads(order)
            self.value = loader(self.number)
        except Exception as error:
            raise _LoadError(_portable(error)) from None
        gc.freeze()  # exclude the objects of imported libraries from garbage collection

    def apply(self, item: Any) -> Any:
        """Return the function's result for an item."""
        assert self.function is not None, "start() comes first"
        try:
            return self.function(self.value, item)
        except BaseException as error:  # panics of Rust libraries derive from BaseException
            raise _portable(error) from None


class _LoadError(Exception):
    """A worker cannot load the value. The argument is the exception that was raised."""


def _portable(error: BaseException) -> Exception:
    """Return an exception that every process can unpickle. Exceptions of other libraries may not be picklable."""
    if isinstance(error, MemlensError):
        return error
    if isinstance(error, MemoryError):
        return WorkerError("a worker ran out of memory; use a smaller --workers or --batch-tokens")
    return RuntimeError(f"a worker failed:\n{''.join(traceback.format_exception(error))}")


def exit_when_parent_dies(parent: int) -> None:
    """End this process when its parent has died. Files are replaced by rename, so this is safe at any time."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)


_worker: Worker | None = None
_order = b""


def _initialize(driver: int, order: bytes) -> None:
    """Prepare a loky worker. This runs before torch is imported, so the value is loaded later, with the first item."""
    global _order, _worker
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=exit_when_parent_dies, args=(driver,), daemon=True).start()
    with Path(os.devnull).open("r+b") as null_device:  # only the driver writes to stdout
        os.dup2(null_device.fileno(), 0)
        os.dup2(null_device.fileno(), 1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    prepare_process()
    count = current_process().name.rpartition("-")[2]  # loky names workers LokyProcess-1, LokyProcess-2, ...
    _worker, _order = Worker(int(count) if count.isdecimal() else 0), order


def _apply(item: Any) -> Any:
    global _order
    assert _worker is not None
    if _order:
        _worker.start(_order)
        _order = b""
    return _worker.apply(item)


# --- local processes --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Task:
    """An item that waits for a worker or is being computed."""

    item: Any
    future: Future[Any] | None = None  # pending call on a loky worker
    result: Any = _END  # the result of a Ray worker
    deaths: int = 0  # number of workers that died while the item was assigned to them

    def count_death(self, reason: str) -> None:
        self.deaths += 1
        if self.deaths > RETRIES:
            raise WorkerError(
                f"{reason} {self.deaths} times in a row on the same work; fix the cause (often a lack of memory: use "
                "fewer --workers) and run the same command again"
            )


class ProcessPool:
    """Worker processes on this machine."""

    def __init__(
        self,
        source: Source,
        workers: int,
        *,
        check_stop: Callable[[], None] = lambda: None,
        driver_works: bool = False,
    ) -> None:
        """Create a pool.

        Args:
            source: Provides the value.
            workers: Number of processes.
            check_stop: Called several times per second, except while this process computes an item. It may raise an
                exception to stop the map.
            driver_works: Use this process, which holds the value anyway, as one of the workers.
        """
        self.source, self.workers, self.check_stop, self.driver_works = source, workers, check_stop, driver_works

    def map(self, function: Callable[[Any, Item], Result], items: Iterable[Item]) -> Generator[Result, None, None]:
        from loky.process_executor import TerminatedWorkerError

        remaining, tasks, copy = iter(items), deque[_Task](), False
        executor: Any = None
        try:
            while True:
                self.check_stop()
                _fill(tasks, remaining, self.workers + AHEAD)
                if not tasks:
                    return
                try:
                    if executor is None:
                        loader = self.source.loader(copy=copy)
                        if loader is None:
                            break
                        processes = min(self.workers, len(tasks)) - self.driver_works
                        executor = _start_executor(max(processes, 1), (loader, function))
                    shared = len(tasks) - self.driver_works  # the last item is left for this process
                    for task in islice(tasks, shared):
                        task.future = task.future or executor.submit(_apply, task.item)
                    first, last = tasks[0].future, tasks[-1]
                    if last.future is None and not (first is not None and first.done()):
                        last.future = self._compute(function, last.item)
                    result = self._wait(tasks[0].future)
                except TerminatedWorkerError as error:
                    self.check_stop()  # the signal that killed the workers may also have been sent to this process
                    _stop_executor(executor)
                    executor = None
                    for task in tasks:
                        if task.future is None or not task.future.done() or task.future.exception() is not None:
                            task.future = None
                            task.count_death(f"a worker process died ({_exit_code(error)})")
                except _LoadError as error:
                    if copy:
                        raise error.args[0] from None
                    copy = True
                    _stop_executor(executor)
                    executor = None
                    for task in tasks:
                        task.future = None
                except OSError as error:
                    raise WorkerError(
                        f"cannot start a worker process ({error.strerror or error}); use fewer --workers and --threads"
                    ) from error
                else:
                    tasks.popleft()
                    yield result
        finally:
            _stop_executor(executor)
        for item in chain((task.item for task in tasks), remaining):
            yield function(self.source.value, item)

    def _compute(self, function: Callable[[Any, Item], Any], item: Item) -> Future[Any]:
        """Apply the function in this process. Errors are the same as those of a worker."""
        future: Future[Any] = Future()
        try:
            future.set_result(function(self.source.value, item))
        except Exception as error:
            future.set_exception(_portable(error))
        return future

    def _wait(self, future: Future[Any] | None) -> Any:
        assert future is not None
        while not wait([future], POLL_SECONDS).done:
            self.check_stop()
        return future.result()


def _fill(tasks: deque[_Task], remaining: Iterator[Any], limit: int) -> None:
    while len(tasks) < limit and (item := next(remaining, _END)) is not _END:
        tasks.append(_Task(item))


def _start_executor(workers: int, order: tuple[Any, ...]) -> Any:
    import cloudpickle
    from loky.backend import resource_tracker
    from loky.process_executor import ProcessPoolExecutor

    # Workers must not import modules from the current folder, which may be an untrusted checkpoint. loky would restart
    # a worker whose memory grows, and the new worker would load the model again.
    environment = {"PYTHONSAFEPATH": "1", "LOKY_MAX_MEMORY_LEAK_SIZE": "1e18"}
    with _environment(environment):
        resource_tracker.ensure_running()
        multiprocessing.resource_tracker.ensure_running()
    initargs = os.getpid(), cloudpickle.dumps(order)
    return ProcessPoolExecutor(workers, initializer=_initialize, initargs=initargs, env=environment)


def _stop_executor(executor: Any) -> None:
    if executor is not None:
        executor.shutdown(kill_workers=True)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _exit_code(error: Exception) -> str:
    codes = re.search(r"exit codes? of the workers? (?:is|are) \{?([^}\n]*)", str(error))
    return codes[1] if codes else "unknown reason"


# --- Ray --------------------------------------------------------------------------------------------------------------


def import_ray() -> Any:
    """Return the package ray. Raises SettingError if it is not installed."""
    with needing("ray", "--executor ray"):
        import ray
    return ray


def versions() -> tuple[str, ...]:
    """Return the versions of memlens, torch and transformers, on which results depend."""
    return tuple(version(package) for package in ("memlens", "torch", "transformers"))


class RayWorker(Worker):
    """A worker on a node of the cluster."""

    def __init__(self, expected: tuple[str, ...]) -> None:
        prepare_process()  # before torch is imported
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        super().__init__()
        self.expected = expected

    def start(self, order: bytes) -> None:
        if self.expected != versions():
            on_node, on_driver = (
                "memlens {} with torch {} and transformers {}".format(*v) for v in (versions(), self.expected)
            )
            raise WorkerError(
                f"a Ray node has {on_node}, but the driver has {on_driver}; install the same versions everywhere"
            )
        super().start(order)


@dataclass(eq=False)
class _Actor:
    """The driver's record of a Ray worker."""

    handle: Any
    starting: Any  # pending call that loads the value; None after it has returned
    has_copy: bool = False
    calls: dict[Any, _Task] = field(default_factory=dict)


class RayPool:
    """Workers on the nodes of a Ray cluster.

    Each node loads the value from its source. Nodes that cannot load it receive a copy through the object store. The
    connection is closed after each map. Otherwise Ray would end this process if an agent died between two maps, when
    the driver does not check its agents.
    """

    def __init__(
        self,
        source: Source,
        workers: int,
        threads: int,
        *,
        address: str | None = None,
        gpus: float = 0.0,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a pool.

        Args:
            source: Provides the value.
            workers: Number of workers. 0 means as many as the cluster has room for.
            threads: Number of CPUs to reserve per worker if it has no GPU.
            address: Address of the cluster. None means $RAY_ADDRESS or, if that is not set, a new local cluster.
            gpus: Number of GPUs per worker.
            check_stop: Called several times per second. It may raise an exception to stop the map.
        """
        self.source, self.workers, self.threads, self.address = source, workers, threads, address
        self.gpus, self.check_stop = gpus, check_stop
        import_ray()  # report a missing package before reading anything

    def map(self, function: Callable[[Any, Item], Result], items: Iterable[Item]) -> Generator[Result, None, None]:
        with connect_ray(self.address, self.check_stop) as ray:
            work = _RayMap(ray, self, function)
            try:
                yield from work.results(iter(items))
            finally:
                work.stop()


class _RayMap:
    """One map on a cluster."""

    def __init__(self, ray: Any, pool: RayPool, function: Callable[[Any, Any], Any]) -> None:
        self.ray, self.pool, self.function = ray, pool, function
        self.size = pool.workers or room_for_workers(ray, pool.threads, pool.gpus)
        cpus = 0 if pool.gpus else pool.threads
        options = {"num_cpus": cpus, "num_gpus": pool.gpus, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        self.actor_class = ray.remote(**options)(RayWorker)
        self.actors: list[_Actor] = []
        self.tasks: deque[_Task] = deque()
        self.unassigned: deque[_Task] = deque()
        # references to the loader in the object store; the key is True if the loader contains a copy of the value
        self.orders: dict[bool, Any] = {}
        self.lost_starts = 0
        self.last_ready = self.last_check = time.monotonic()

    def results(self, items: Iterator[Any]) -> Iterator[Any]:
        while True:
            self.pool.check_stop()
            before = len(self.tasks)
            _fill(self.tasks, items, self.size + AHEAD)
            self.unassigned.extend(list(self.tasks)[before:])
            if not self.tasks:
                return
            if self.tasks[0].result is not _END:
                yield self.tasks.popleft().result
                continue
            while len(self.actors) < min(self.size, len(self.tasks)):
                handle = self.actor_class.remote(versions())
                self.actors.append(_Actor(handle, handle.start.remote(self._order(copy=False))))
            ready = [actor for actor in self.actors if actor.starting is None]
            while self.unassigned and ready:
                actor = min(ready, key=lambda actor: len(actor.calls))
                if len(actor.calls) == _MOST_CALLS:
                    break
                task = self.unassigned.popleft()
                actor.calls[actor.handle.apply.remote(task.item)] = task
            self._receive()

    def _order(self, *, copy: bool) -> Any:
        import cloudpickle

        if copy not in self.orders:
            loader = self.pool.source.loader(copy=copy, gpus=self.pool.gpus)
            self.orders[copy] = self.ray.put(cloudpickle.dumps((loader, self.function)))
        return self.orders[copy]

    def _receive(self) -> None:
        """Wait up to POLL_SECONDS for replies and handle them."""
        by_call = {call: actor for actor in self.actors for call in actor.calls}
        by_call |= {actor.starting: actor for actor in self.actors if actor.starting is not None}
        ready, _ = self.ray.wait(list(by_call), num_returns=len(by_call), timeout=POLL_SECONDS)
        now = time.monotonic()
        if now - self.last_check > CHECK_SECONDS:
            check_agents(self.ray)
            self.last_check = now
        for call in ready:
            if by_call[call] in self.actors:  # skip replies of workers that were lost in an earlier iteration
                self._handle(by_call[call], call)
        if any(actor.starting is None for actor in self.actors):
            self.last_ready = now
        elif now - self.last_ready > START_SECONDS:
            raise WorkerError(
                f"no Ray worker has started for {START_SECONDS:.0f} seconds; the cluster has no room for a worker with "
                f"{self.pool.threads} threads: wait, or use fewer --threads"
            )

    def _handle(self, actor: _Actor, call: Any) -> None:
        try:
            result = self.ray.get(call)
        except self.ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, _LoadError):
                raise error.cause from None
            if actor.has_copy:
                raise error.cause.args[0] from None
            actor.has_copy = True
            actor.starting = actor.handle.start.remote(self._order(copy=True))
        except self.ray.exceptions.RayError as error:
            check_agents(self.ray)
            self._lose(actor, f"a Ray worker was lost ({type(error).__name__})")
        else:
            if call is actor.starting:
                actor.starting, self.lost_starts = None, 0
            else:
                actor.calls.pop(call).result = result

    def _lose(self, actor: _Actor, reason: str) -> None:
        """Remove a lost worker and reassign its items."""
        self.actors.remove(actor)
        self.ray.kill(actor.handle)
        if actor.starting is not None:
            self.lost_starts += 1
            if self.lost_starts > RETRIES:
                raise WorkerError(
                    f"{reason} while starting, {self.lost_starts} times in a row; fix the cause (often a lack of "
                    "memory: use fewer --workers) and run the same command again"
                )
        for task in list(actor.calls.values())[:1]:  # a worker computes one item at a time
            task.count_death(reason)
        self.unassigned.extendleft(reversed(actor.calls.values()))

    def stop(self) -> None:
        """End the workers. Workers whose agent is lost end by themselves."""
        if not _lost_agent(self.ray):
            for actor in self.actors:
                self.ray.kill(actor.handle)


def room_for_workers(ray: Any, threads: int, gpus: float) -> int:
    """Return the number of workers that the cluster has room for, at least one."""
    resources = ray.cluster_resources()
    room = resources.get("GPU", 0) / gpus if gpus else resources.get("CPU", 1) / threads
    if gpus and room < 1:
        raise SettingError(f"--gpus-per-worker is {gpus}, but the Ray cluster has {resources.get('GPU', 0):g} GPUs")
    return max(1, int(room))


@contextmanager
def connect_ray(address: str | None, check_stop: Callable[[], None] = lambda: None) -> Iterator[Any]:
    """Connect to a Ray cluster, or start one on this machine if there is no address.

    An existing connection is reused and left open.

    Raises:
        WorkerError: The cluster cannot be reached, or one of its agents exited.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    # Without an address, Ray would connect to the last cluster on this machine, which may be gone.
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":
        ensure_ray_token()
    else:
        if address == "auto":  # stands for the last cluster as well
            with suppress(ConnectionError):  # ray.init reports that there is no cluster
                address = ray._private.services.canonicalize_bootstrap_address(address) or address
        _wait_for_cluster(address, check_stop)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=True)
    except Exception as error:  # if an agent ends during startup, Ray may raise many types of exceptions
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        place = "no Ray cluster can be started here" if address == "local" else f"cannot connect to Ray at {address}"
        advice = "run the same command again" if address == "local" else "check --ray-address"
        raise WorkerError(f"{place} ({reason}); {advice}") from error
    try:
        yield ray
    except OSError as error:  # a call failed ("Broken pipe") before Ray noticed that the agent was gone
        raise _agent_error(_lost_agent(ray) or "connection") from error
    finally:
        if _lost_agent(ray):  # shutdown() would wait for the lost agent until Ray ends this process with exit code 1
            atexit.unregister(ray.shutdown)
        else:
            with suppress(OSError):
                ray.shutdown()


def _wait_for_cluster(address: str, check_stop: Callable[[], None]) -> None:
    """Wait until the head node accepts connections. Ray itself would wait for minutes without a message."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        return  # ray.init rejects an invalid address
    deadline, is_first = time.monotonic() + CONNECT_SECONDS, True
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=AGENT_SECONDS):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"no Ray cluster responds at {address} ({error.strerror or error}); check --ray-address and "
                    "RAY_ADDRESS"
                ) from error
        if is_first:
            print(f"memlens: waiting up to {CONNECT_SECONDS:.0f} s for the Ray cluster at {address}", file=sys.stderr)
            is_first = False
        check_stop()
        time.sleep(POLL_SECONDS)


def ensure_ray_token() -> None:
    """Set an authentication token for a cluster on this machine if Ray cannot write one to ~/.ray."""
    if os.environ.keys() & {"RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
        return
    try:
        folder = Path("~/.ray").expanduser()
        if (folder / "auth_token").is_file():
            return
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError):  # the home folder is read-only or missing
        os.environ["RAY_AUTH_TOKEN"] = uuid4().hex


def check_agents(ray: Any) -> None:
    """Raise RayAgentError if an agent is gone. Without this check, Ray would end this process without a message."""
    if agent := _lost_agent(ray):
        raise _agent_error(agent)


def _agent_error(agent: str) -> RayAgentError:
    return RayAgentError(
        f"Ray's {agent} has ended; completed work is kept: start the cluster again, then run the same command"
    )


def _lost_agent(ray: Any) -> str:
    """Return the name of a required Ray agent that no longer accepts connections, or an empty string."""
    node = getattr(ray._private.worker, "_global_node", None)
    if node is None:  # Ray is not connected, or uses Ray Client, which has no agent on this machine
        return ""
    host, _, port = str(node.gcs_address).rpartition(":")
    head_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    agents: list[tuple[str, Any, Any]] = [("head (gcs_server)", head_family, (host.strip("[]"), int(port)))]
    if hasattr(socket, "AF_UNIX"):  # not on Windows
        agents.insert(0, ("agent on this machine (raylet)", socket.AF_UNIX, node.raylet_socket_name))
    for name, family, address in agents:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(AGENT_SECONDS)
            try:
                probe.connect(address)
            except (ConnectionRefusedError, FileNotFoundError):
                return name
            except OSError:
                continue  # the agent may be busy or on a slow network
    return ""
