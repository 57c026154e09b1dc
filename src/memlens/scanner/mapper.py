"""One function over many items, in this process or on a Ray cluster: what values and experiments need of an executor.

Work is a function of the model and an item; it and the items can be pickled, and an answer depends on nothing else, so
that it is the same wherever it is computed. Answers come in the order of the items. On a cluster every worker loads the
model once and is asked for one answer after another; none of Ray's own retries is relied upon.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch

from memlens.errors import MemlensError, WorkerError
from memlens.models.memory_model import MemoryModel
from memlens.scanner.executors import Ledger, ModelRecipe
from memlens.scanner.ray import START_SECONDS, connected, own_error, room_for

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Mapper(Protocol):
    """Where items are worked on."""

    def map(self, work: Callable[[MemoryModel, Item], Answer], items: Iterable[Item]) -> Iterator[Answer]:
        """The answers, in the order of the items; few are in memory at a time."""


class Here:
    """One after another in this process, with the model that is loaded already."""

    def __init__(self, model: MemoryModel) -> None:
        self.model = model

    def map(self, work: Callable[[MemoryModel, Item], Answer], items: Iterable[Item]) -> Iterator[Answer]:
        for item in items:
            yield work(self.model, item)


_AHEAD = 2  # answers a worker that may wait to be taken


class MapWorker:
    """What runs on a node."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model: MemoryModel | None = None

    def start(self, recipe: ModelRecipe, work: Callable[[MemoryModel, Any], Any]) -> bool:
        """Load the model; False if this node does not have it."""
        self.work = work
        try:
            self.model = recipe.load()
        except MemlensError:
            if recipe.copy:
                raise
            return False
        return True

    def answer(self, item: Any) -> Any:
        assert self.model is not None, "start comes first"
        return self.work(self.model, item)


class RayMapper:
    """Maps on a Ray cluster; `workers` 0 is as many as it has room for."""

    def __init__(
        self, model: MemoryModel, workers: int, threads: int, address: str | None = None, gpus_per_worker: float = 0
    ) -> None:
        self.model, self.workers, self.threads = model, workers, threads
        self.address, self.gpus = address, gpus_per_worker

    def map(self, work: Callable[[MemoryModel, Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        with connected(self.address) as ray:
            crew = _MapCrew(ray, self, work)
            try:
                yield from crew.answers(iter(items))
            finally:
                crew.end()


class _MapCrew:
    """The workers of one map."""

    def __init__(self, ray: Any, mapper: RayMapper, work: Any) -> None:
        self.ray, self.mapper = ray, mapper
        recipe = ModelRecipe.of(mapper.model, mapper.model.fingerprint())
        self.recipe = replace(recipe, device="cuda" if mapper.gpus else "cpu")
        self.work = ray.put(work)
        self.copy: Any = None
        cpus = 0 if mapper.gpus else mapper.threads
        self.make = ray.remote(num_cpus=cpus, num_gpus=mapper.gpus, max_restarts=0, scheduling_strategy="SPREAD")(
            MapWorker
        )
        room = room_for(ray, mapper.threads, mapper.gpus)
        self.size = min(mapper.workers or room, room)
        self.actors: deque[Any] = deque()
        self.ledger = Ledger(())  # counts what is lost, as for a scan
        self._hire(self.size)

    def answers(self, items: Iterator[Any]) -> Iterator[Any]:
        """In order; an item whose worker was lost goes to another."""
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
                return self.ray.get(call)
            except self.ray.exceptions.RayTaskError as error:
                raise own_error(error) from error
            except self.ray.exceptions.RayError as error:
                self.ledger.fail_start(f"a Ray worker was lost ({type(error).__name__})")
                if actor in self.actors:
                    self.ray.kill(actor)
                    self.actors.remove(actor)
                if not self.actors:  # else the others do it: the cluster may have no room for a new one
                    self._hire(1)
                actor, call = self._ask(item)

    def _hire(self, count: int) -> None:
        """Start workers; a node that lacks the model gets a copy of it."""
        hired = [self.make.remote(self.mapper.threads) for _ in range(count)]
        self.actors.extend(hired)
        recipe: Any = self.recipe if self.copy is None else self.copy
        for actor, has_it in zip(
            hired, self._get([actor.start.remote(recipe, self.work) for actor in hired]), strict=True
        ):
            if not has_it:
                self.copy = self.copy or self.ray.put(self.recipe.as_copy(self.mapper.model))
                self._get([actor.start.remote(self.copy, self.work)])

    def _get(self, calls: list[Any]) -> list[Any]:
        try:
            answers: list[Any] = self.ray.get(calls, timeout=START_SECONDS)
        except self.ray.exceptions.RayTaskError as error:
            raise own_error(error) from error
        except self.ray.exceptions.RayError as error:
            raise WorkerError(f"Ray workers did not start ({type(error).__name__}); look at the cluster") from error
        return answers

    def end(self) -> None:
        for actor in self.actors:
            self.ray.kill(actor)
