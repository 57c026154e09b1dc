"""RayMapper: a map over items on the nodes of a Ray cluster, each worker with the model loaded.

Workers and the connection are there for one map: Ray ends a process whose agents are gone, which a driver that computes
alone between two maps would not notice. Answers come in the order of the items, so that nobody can tell how many
workers there were.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

from memlens.errors import WorkerError
from memlens.models.memory_model import MemoryModel
from memlens.processes import RETRIES
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

_AHEAD = 2  # items that a worker has, so that it never waits for the driver


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
    """The workers of one map."""

    def __init__(self, ray: Any, mapper: RayMapper, work: Callable[[MemoryModel, Any], Any]) -> None:
        self.ray, self.mapper = ray, mapper
        recipe = ModelRecipe.of(mapper.model, mapper.model.fingerprint())
        self.recipe: Any = replace(recipe, device="cuda" if mapper.gpus else "cpu")
        self.work = ray.put(work)
        self.make = actor_class(ray, MapWorker, mapper.threads, mapper.gpus)
        room = room_for(ray, mapper.threads, mapper.gpus)
        self.size = min(mapper.workers or room, room)
        self.actors: deque[Any] = deque()

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
        for lost in count(1):
            try:
                while not self.ray.wait([call], timeout=AGENT_SECONDS)[0]:
                    refuse_lost_agent(self.ray)
                return self.ray.get(call)
            except self.ray.exceptions.RayTaskError as error:
                raise worker_error(error) from error
            except self.ray.exceptions.RayError as error:
                refuse_lost_agent(self.ray)
                if lost > RETRIES:
                    raise WorkerError(
                        f"a Ray worker was lost ({type(error).__name__}), as were {RETRIES} before it with the same "
                        "work; mend the cause (often memory: try fewer --workers) and run the same command again"
                    ) from error
            if actor in self.actors:
                self.ray.kill(actor)
                self.actors.remove(actor)
            if not self.actors:  # else the others do it: the cluster may have no room for a new one
                self.start(1)
            actor, call = self._ask(item)

    def start(self, number: int) -> None:
        """Start workers; a node that lacks the model gets a copy of it, and so do those that start later."""
        started = [self.make.remote(self.mapper.threads, versions()) for _ in range(number)]
        self.actors.extend(started)
        loaded = self._get([actor.start.remote(self.recipe, self.work) for actor in started])
        for actor, has_model in zip(started, loaded, strict=True):
            if not has_model:
                if isinstance(self.recipe, ModelRecipe):
                    self.recipe = self.ray.put(self.recipe.as_copy(self.mapper.model))
                self._get([actor.start.remote(self.recipe, self.work)])

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
