"""RayMapper: a map over items on the nodes of a Ray cluster, each worker with the model loaded.

Workers and the connection are there for one map: Ray ends a process whose agents are gone, which a driver that computes
alone between two maps would not notice. Answers come in the order of the items, so that nobody can tell how many
workers there were.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any

from memlens.errors import WorkerError
from memlens.models.memory_model import MemoryModel
from memlens.processes import AHEAD, RETRIES
from memlens.scanner.executors import ModelRecipe
from memlens.scanner.ray_cluster import (
    AGENT_SECONDS,
    START_SECONDS,
    actor_class,
    connected,
    end_all,
    refuse_lost_agent,
    room_for,
    worker_error,
)
from memlens.scanner.ray_worker import MapWorker, versions


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
                pool.start(pool.size)
                yield from pool.answers(iter(items))
            finally:
                pool.end()


class RayMapPool:
    """The workers of one map: those that are ready, and those that still load the model."""

    def __init__(self, ray: Any, mapper: RayMapper, work: Callable[[MemoryModel, Any], Any]) -> None:
        self.ray, self.mapper = ray, mapper
        self.recipe = ModelRecipe.of(mapper.model, mapper.model.fingerprint()).elsewhere(mapper.gpus)
        self.stored, self.work = ray.put(self.recipe), ray.put(work)
        self.make = actor_class(ray, MapWorker, mapper.threads, mapper.gpus)
        room = room_for(ray, mapper.threads, mapper.gpus)
        self.size = min(mapper.workers or room, room)
        self.actors: deque[Any] = deque()
        self.loading: dict[Any, Any] = {}  # by the call that loads the model

    def answers(self, items: Iterator[Any]) -> Iterator[Any]:
        """The answers in the order of the items; an item whose worker was lost goes to another."""
        waiting: deque[tuple[Any, tuple[Any, Any]]] = deque()  # item, (worker, call)
        for item in items:
            waiting.append((item, self._ask(item)))
            if len(waiting) >= AHEAD * len(self.actors):
                yield self._answer(*waiting.popleft())
        while waiting:
            yield self._answer(*waiting.popleft())

    def _ask(self, item: Any) -> tuple[Any, Any]:
        self._wait_for_a_worker()
        self.actors.rotate(-1)
        return self.actors[0], self.actors[0].answer.remote(item)

    def _answer(self, item: Any, asked: tuple[Any, Any]) -> Any:
        actor, call = asked
        for lost in count(1):
            try:
                while not self.ray.wait([call], timeout=AGENT_SECONDS)[0]:
                    refuse_lost_agent(self.ray)
                return self.ray.get(call)
            except self.ray.exceptions.RayTaskError as error:
                raise worker_error(error) from error
            except self.ray.exceptions.RayError as error:
                self._refuse_more_losses(error, lost, "with the same work")
            if actor in self.actors:
                self.ray.kill(actor)
                self.actors.remove(actor)
            actor, call = self._ask(item)

    def start(self, number: int) -> None:
        """Start workers; what is asked goes to whoever is ready."""
        for _ in range(number):
            actor = self.make.remote(self.mapper.threads, versions())
            self.loading[actor.start.remote(self.stored, self.work)] = actor

    def _wait_for_a_worker(self) -> None:
        """Take in workers that have become ready; wait for one only where there is none."""
        until = time.monotonic() + START_SECONDS
        for lost in count(1):
            try:
                while self._take_ready(0):
                    pass
                while not self.actors:
                    if not self.loading:
                        self.start(1)
                    if not self._take_ready(AGENT_SECONDS):
                        refuse_lost_agent(self.ray)
                    if time.monotonic() > until:
                        raise WorkerError(
                            f"no Ray worker was ready within {START_SECONDS:.0f} seconds; the cluster has no room for "
                            f"one with {self.mapper.threads} threads: wait, or try fewer --threads"
                        )
                return
            except self.ray.exceptions.RayError as error:  # one that was loading
                self._refuse_more_losses(error, lost, "while they were starting")

    def _take_ready(self, seconds: float) -> bool:
        """Take in one worker that has answered; where a node lacks the model, it gets a copy, and so do later ones."""
        ready = self.ray.wait(list(self.loading), timeout=seconds)[0] if self.loading else []
        for call in ready:
            try:
                has_model = self.ray.get(call)
            except self.ray.exceptions.RayTaskError as error:
                raise worker_error(error) from error
            except self.ray.exceptions.RayError:
                self.ray.kill(self.loading.pop(call))
                raise
            actor = self.loading.pop(call)
            if has_model:
                self.actors.append(actor)
                continue
            if not self.recipe.copy:
                self.recipe = self.recipe.as_copy(self.mapper.model)
                self.stored = self.ray.put(self.recipe)
            self.loading[actor.start.remote(self.stored, self.work)] = actor
        return bool(ready)

    def _refuse_more_losses(self, error: Exception, lost: int, when: str) -> None:
        refuse_lost_agent(self.ray)
        if lost > RETRIES:
            raise WorkerError(
                f"a Ray worker was lost ({type(error).__name__}), as were {RETRIES} before it {when}; "
                "mend the cause (often memory: try fewer --workers) and run the same command again"
            ) from error

    def end(self) -> None:
        end_all(self.ray, [*self.actors, *self.loading.values()])
