"""RayExecutor and RayMapper: the same work on the nodes of a Ray cluster.

The model is loaded once per worker, from where it was loaded here, or as a copy through the object store where a node
does not have it. Sentences travel through the object store, so nodes share no file system. At intervals all workers
hand over what they have found; it is merged as a tree on the cluster, and the driver takes in the root and saves it as
the one part of this run. So the driver never holds more than three states, and what it has saved outlives it. What a
lost worker had not handed over goes to others; none of Ray's own retries is relied upon.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray

from memlens import __version__
from memlens.errors import WorkerError
from memlens.models.memory_model import MemoryModel
from memlens.scanner.executors import ModelRecipe, Saver, ScanJob, WorkQueue
from memlens.scanner.ray_cluster import (
    AGENT_SECONDS,
    actor_class,
    connected,
    end_all,
    import_ray,
    refuse_lost_agent,
    room_for,
    worker_error,
)
from memlens.scanner.scanner import PackedSentences, Worker
from memlens.scanner.state import BatchRange, LayerShape, ScanState, shapes_of
from memlens.settings import ScanSettings

Arrays = dict[str, NDArray[Any]]


def _versions() -> tuple[str, str]:
    return __version__, torch.__version__


class RayWorker:
    """A worker that is asked by calls, one after another."""

    def __init__(self, settings: ScanSettings, layers: tuple[int, ...], versions: tuple[str, str]) -> None:
        self.settings, self.layers, self.versions = settings, layers, versions
        self.worker: Worker | None = None

    def start(self, recipe: ModelRecipe) -> bool:
        """Load the model; False if this node does not have it."""
        if self.versions != _versions():
            theirs, ours = ("memlens {} with torch {}".format(*v) for v in (_versions(), self.versions))
            raise WorkerError(f"a Ray node has {theirs}, the driver {ours}; results would differ: install the same")
        torch.set_num_threads(self.settings.threads)
        model = recipe.load_or_none()
        if model is not None:
            self.worker = Worker(model, self.settings, self.layers)
        return model is not None

    def scan(self, batches: BatchRange, sentences: PackedSentences) -> int:
        """Scan some batches; how many tokens were fed comes back."""
        assert self.worker is not None, "start comes first"
        before = self.worker.state.tokens
        self.worker.scan(batches, lambda number: sentences.unpack())
        return self.worker.state.tokens - before

    def hand_over(self) -> Arrays:
        """The state that was added since the last call."""
        assert self.worker is not None, "start comes first"
        return self.worker.take_state().arrays()


def merge_states(settings: ScanSettings, shapes: Mapping[int, LayerShape], one: Arrays, other: Arrays) -> Arrays:
    """Two disjoint states as one; needs no model."""
    states = []
    for arrays in (one, other):
        state = ScanState.empty(shapes, settings)
        state.restore_(arrays)
        states.append(state)
    states[0].merge(states[1])
    return states[0].arrays()


_AHEAD = 2  # ranges, or items of a map, that a worker has, so that it never waits for the driver
_LOOK = 0.2  # seconds between two looks whether somebody wants to stop
_WINDOWS = 4  # that are kept in the object store
START_SECONDS = 300.0  # so long no worker at all may be there


class RayExecutor:
    """Runs a job on a Ray cluster; `workers` 0 is as many as it has room for."""

    def __init__(self, workers: int, address: str | None, gpus_per_worker: float) -> None:
        self.workers, self.address, self.gpus = workers, address, gpus_per_worker
        import_ray()  # a missing package is said before anything is read

    def run(self, job: ScanJob) -> None:
        with connected(self.address) as ray:
            pool = RayPool(ray, job, self.workers, self.gpus)
            try:
                pool.work()
            finally:
                pool.end()


@dataclass(eq=False)
class RayActor:
    """One worker as the driver sees it."""

    handle: Any
    starting: Any  # the call that loads the model; None when it is done
    calls: dict[Any, BatchRange] = field(default_factory=dict)  # running, in this order
    unsaved: list[BatchRange] = field(default_factory=list)  # done since the worker last handed over
    handed: set[Any] = field(default_factory=set)  # calls that a handover comes after: their batches are in it


@dataclass
class Handover:
    """The states of workers on their way to the driver."""

    root: Any
    leaves: list[tuple[Any, list[BatchRange]]]  # each worker's state, and what is in it


class RayPool:
    """The workers of one job."""

    def __init__(self, ray: Any, job: ScanJob, size: int, gpus: float) -> None:
        self.ray, self.job = ray, job
        self.queue = WorkQueue(job.ranges)
        self.shapes = shapes_of(job.model, job.layers, job.settings)
        self.state = ScanState.empty(self.shapes, job.settings)
        self.saver = Saver(job.parts, job.parts.new_name(), job.save_seconds)
        self.actors: list[RayActor] = []
        self.handover: Handover | None = None
        self.windows: dict[int, Any] = {}
        self.copy: Any = None
        self.recipe = ray.put(replace(job.recipe(), device="cuda" if gpus else "cpu"))
        threads = job.settings.threads
        self.size = size or room_for(ray, threads, gpus)
        self.make = actor_class(ray, RayWorker, threads, gpus)
        self.merge = ray.remote(num_cpus=0, max_retries=3)(merge_states)
        self.last_sign = time.monotonic()  # when a worker last gave one
        self.last_look = time.monotonic()  # at Ray's agents

    def work(self) -> None:
        """Hand out batches until every one is saved."""
        while True:
            if self.queue.has_more():
                while len(self.actors) < self.size:
                    self._start()
            self._supply()
            calls = [call for actor in self.actors for call in actor.calls]
            if not calls and not self.queue.has_more() and self.handover is None:
                if not any(actor.unsaved for actor in self.actors):
                    return
                self._begin_handover()
            elif self.handover is None and self.saver.is_due():
                self._begin_handover()
            self._listen()
            if self.job.stop.stopped:
                self._stop()

    def _start(self) -> None:
        handle = self.make.remote(self.job.settings, self.job.layers, _versions())
        self.actors.append(RayActor(handle, handle.start.remote(self.recipe)))

    def _supply(self) -> None:
        for actor in self.actors:
            while actor.starting is None and len(actor.calls) < _AHEAD:
                batches = self.queue.take()
                if batches is None:
                    return
                actor.calls[actor.handle.scan.remote(batches, self._window(batches.window))] = batches

    def _window(self, number: int) -> Any:
        if number not in self.windows:
            while len(self.windows) >= _WINDOWS:
                del self.windows[next(iter(self.windows))]
            self.windows[number] = self.ray.put(PackedSentences.pack(self.job.window(number)))
        return self.windows[number]

    def _listen(self) -> None:
        by_call: dict[Any, RayActor | None] = {call: actor for actor in self.actors for call in actor.calls}
        by_call |= {actor.starting: actor for actor in self.actors if actor.starting is not None}
        if self.handover is not None:
            by_call[self.handover.root] = None
        if not by_call:
            return
        ready, _ = self.ray.wait(list(by_call), num_returns=len(by_call), timeout=_LOOK)
        if time.monotonic() - self.last_look > AGENT_SECONDS:
            refuse_lost_agent(self.ray)
            self.last_look = time.monotonic()
        for call in ready:
            actor = by_call[call]
            if actor is None:
                self._end_handover()
            elif actor in self.actors:  # else it was found dead by an earlier call
                self._hear(actor, call)
        if any(actor.starting is None for actor in self.actors):
            self.last_sign = time.monotonic()
        elif time.monotonic() - self.last_sign > START_SECONDS:
            raise WorkerError(
                f"no Ray worker has started for {START_SECONDS:.0f} seconds; the cluster has no room for one with "
                f"{self.job.settings.threads} threads: wait, or try fewer --threads"
            )

    def _hear(self, actor: RayActor, call: Any) -> None:
        """The answer to one call; a worker that has none is lost."""
        try:
            answer = self.ray.get(call)
        except self.ray.exceptions.RayTaskError as error:
            raise worker_error(error) from error
        except self.ray.exceptions.RayError as error:
            refuse_lost_agent(self.ray)
            self._lose(actor, f"a Ray worker was lost ({type(error).__name__})")
            return
        if call is actor.starting:
            # A node that lacks the model, or has another one under its name, gets a copy.
            actor.starting = None if answer else actor.handle.start.remote(self._copy())
            self.queue.note_start()
        else:
            batches = actor.calls.pop(call)
            if call in actor.handed:
                actor.handed.remove(call)
            else:
                actor.unsaved.append(batches)
            self.job.on_tokens(answer)

    def _copy(self) -> Any:
        if self.copy is None:
            self.copy = self.ray.put(self.job.recipe().as_copy(self.job.model))
        return self.copy

    def _lose(self, actor: RayActor, reason: str) -> None:
        self.actors.remove(actor)
        self.ray.kill(actor.handle)
        if actor.starting is not None:
            self.queue.fail_start(reason)
        # What the worker was asked to hand over is lost or not with that handover.
        running = [batches for call, batches in actor.calls.items() if call not in actor.handed]
        self.queue.lose([*actor.unsaved, *running], reason)

    def _begin_handover(self) -> None:
        """Ask every worker for what it has; calls of one worker are answered in their order."""
        leaves = []
        for actor in self.actors:
            running = [batches for call, batches in actor.calls.items() if call not in actor.handed]
            if actor.unsaved or running:
                leaves.append((actor.handle.hand_over.remote(), [*actor.unsaved, *running]))
                actor.unsaved, actor.handed = [], set(actor.calls)
        if not leaves:
            self.saver.save(self.state)
            return
        merge = partial(self.merge.remote, self.job.settings, self.shapes)
        level = [leaf for leaf, _ranges in leaves]
        while len(level) > 1:
            pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
            level = [merge(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
        self.handover = Handover(level[0], leaves)

    def _end_handover(self) -> None:
        """Take in the root; where a part of the tree was lost, what is left of its leaves; the rest is done again."""
        assert self.handover is not None
        began = time.monotonic()
        leaves, root = self.handover.leaves, self.handover.root
        self.handover = None
        if not self._take_in(root):
            for leaf, _ranges in leaves:
                self._take_in(leaf)
        self.saver.save(self.state, began)
        # Asked of the state itself: a worker may have handed over although one of its ranges had failed.
        left = [rest for _leaf, ranges in leaves for batches in ranges for rest in self.state.done.left_of(batches)]
        self.queue.lose(left, "a Ray worker was lost before it had handed over what it found")

    def _take_in(self, ref: Any) -> bool:
        part = ScanState.empty(self.shapes, self.job.settings)
        try:
            part.restore_(self.ray.get(ref))
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, (self.ray.exceptions.RayError, type(None))):
                return False
            raise worker_error(error) from error
        except self.ray.exceptions.RayError:
            return False
        self.state.merge(part)
        return True

    def _stop(self) -> None:
        """Let every worker finish its batches and hand over, then raise."""
        for actor in [actor for actor in self.actors if actor.starting is not None]:
            self.actors.remove(actor)
            self.ray.kill(actor.handle)
        while any(actor.calls for actor in self.actors) or self.handover is not None:
            self._listen()
        self._begin_handover()
        while self.handover is not None:
            self._listen()
        self.job.stop.check()

    def end(self) -> None:
        """End whoever is left, at once."""
        end_all(self.ray, [actor.handle for actor in self.actors])
        self.actors = []


class MapWorker:
    """Answers one item after another on a node."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def start(self, recipe: ModelRecipe, work: Callable[[MemoryModel, Any], Any]) -> bool:
        """Load the model; False if this node does not have it."""
        self.work, self.model = work, recipe.load_or_none()
        return self.model is not None

    def answer(self, item: Any) -> Any:
        assert self.model is not None, "start comes first"
        return self.work(self.model, item)


class RayMapper:
    """The Mapper on a Ray cluster, with so many workers at most, or with 0 as many as it has room for."""

    def __init__(
        self, model: MemoryModel, threads: int, workers: int, address: str | None, gpus_per_worker: float
    ) -> None:
        self.model, self.threads, self.workers = model, threads, workers
        self.address, self.gpus = address, gpus_per_worker

    def map(self, work: Callable[[MemoryModel, Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        with connected(self.address) as ray:
            pool = RayMapPool(ray, self, work)
            try:
                yield from pool.answers(iter(items))
            finally:
                pool.end()


class RayMapPool:
    """The workers of one map."""

    def __init__(self, ray: Any, mapper: RayMapper, work: Any) -> None:
        self.ray, self.mapper = ray, mapper
        recipe = ModelRecipe.of(mapper.model, mapper.model.fingerprint())
        self.recipe = replace(recipe, device="cuda" if mapper.gpus else "cpu")
        self.work = ray.put(work)
        self.copy: Any = None
        self.make = actor_class(ray, MapWorker, mapper.threads, mapper.gpus)
        room = room_for(ray, mapper.threads, mapper.gpus)
        self.size = min(mapper.workers or room, room)
        self.actors: deque[Any] = deque()
        self.queue = WorkQueue(())  # counts lost workers, as for a scan
        self._start(self.size)

    def answers(self, items: Iterator[Any]) -> Iterator[Any]:
        """The answers in the order of the items; an item whose worker was lost goes to another."""
        waiting: deque[tuple[Any, Any]] = deque()  # item, call
        for item in items:
            waiting.append((item, self._ask(item)))
            if len(waiting) >= _AHEAD * self.size:
                yield self._answer(*waiting.popleft())
        while waiting:
            yield self._answer(*waiting.popleft())

    def _ask(self, item: Any) -> Any:
        self.actors.rotate(-1)
        return self.actors[0], self.actors[0].answer.remote(item)

    def _answer(self, item: Any, asked: tuple[Any, Any]) -> Any:
        actor, call = asked
        while True:
            try:
                while not self.ray.wait([call], timeout=AGENT_SECONDS)[0]:
                    refuse_lost_agent(self.ray)
                return self.ray.get(call)
            except self.ray.exceptions.RayTaskError as error:
                raise worker_error(error) from error
            except self.ray.exceptions.RayError as error:
                refuse_lost_agent(self.ray)
                self.queue.fail_start(f"a Ray worker was lost ({type(error).__name__})")
                if actor in self.actors:
                    self.ray.kill(actor)
                    self.actors.remove(actor)
                if not self.actors:  # else the others do it: the cluster may have no room for a new one
                    self._start(1)
                actor, call = self._ask(item)

    def _start(self, count: int) -> None:
        """Start workers; a node that lacks the model gets a copy of it."""
        started = [self.make.remote(self.mapper.threads) for _ in range(count)]
        self.actors.extend(started)
        recipe: Any = self.recipe if self.copy is None else self.copy
        loaded = self._get([actor.start.remote(recipe, self.work) for actor in started])
        for actor, has_model in zip(started, loaded, strict=True):
            if not has_model:
                self.copy = self.copy or self.ray.put(self.recipe.as_copy(self.mapper.model))
                self._get([actor.start.remote(self.copy, self.work)])

    def _get(self, calls: list[Any]) -> list[Any]:
        try:
            answers: list[Any] = self.ray.get(calls, timeout=START_SECONDS)
        except self.ray.exceptions.RayTaskError as error:
            raise worker_error(error) from error
        except self.ray.exceptions.RayError as error:
            raise WorkerError(f"Ray workers did not start ({type(error).__name__}); look at the cluster") from error
        return answers

    def end(self) -> None:
        end_all(self.ray, self.actors)
