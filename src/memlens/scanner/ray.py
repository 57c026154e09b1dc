"""RayExecutor: a scan on the nodes of a Ray cluster.

The model is loaded once per worker, from where it was loaded here, or as a copy through the object store where a node
does not have it. Sentences travel through the object store, so nodes share no file system. At intervals all workers
hand over what they have found; it is merged as a tree on the cluster, and the driver takes in the root and saves it as
the one part of this run. So the driver never holds more than three states, and what it has saved outlives it. What a
lost worker had not handed over goes to others; none of Ray's own retries is relied upon.
"""

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from memlens.errors import WorkerError
from memlens.processes import AHEAD
from memlens.scanner.executors import Saver, ScanJob, WorkQueue
from memlens.scanner.ray_cluster import (
    AGENT_SECONDS,
    START_SECONDS,
    actor_class,
    connected,
    end_all,
    import_ray,
    refuse_lost_agent,
    room_for,
    worker_error,
)
from memlens.scanner.ray_worker import ScanWorker, merge_states, versions
from memlens.scanner.scanner import PackedSentences
from memlens.scanner.state import BatchRange, ScanState, shapes_of

_LOOK = 0.2  # seconds between two looks whether somebody wants to stop
_WINDOWS = 4  # that are kept in the object store


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
        self.recipe = job.recipe().elsewhere(gpus)
        self.stored = ray.put(self.recipe)
        threads = job.settings.threads
        self.size = size or room_for(ray, threads, gpus)
        self.make = actor_class(ray, ScanWorker, threads, gpus)
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
        handle = self.make.remote(self.job.settings, self.job.layers, versions())
        self.actors.append(RayActor(handle, handle.start.remote(self.stored)))

    def _supply(self) -> None:
        for actor in self.actors:
            while actor.starting is None and len(actor.calls) < AHEAD:
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
            self.copy = self.ray.put(self.recipe.as_copy(self.job.model))
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
