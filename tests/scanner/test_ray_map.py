"""A map on Ray whose workers are lost, slow or without the model. Needs no cluster: Ray's part is played here."""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from memlens.errors import WorkerError
from memlens.models.load import load
from memlens.models.memory_model import MemoryModel
from memlens.scanner import ray_map
from memlens.scanner.ray_map import RayMapper, RayMapPool
from memlens.testing import tiny_model, tiny_tokenizer


class RayError(Exception):
    pass


class RayTaskError(RayError):
    pass


class Call:
    """Something that a worker was asked."""

    def __init__(self, give: Callable[[], Any]) -> None:
        self.give, self.is_ready = give, True


class Cluster:
    """Ray, with room for two workers; `load` and `answer` say what a worker does, by its number."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
    _private = SimpleNamespace(worker=SimpleNamespace())

    def __init__(self, answer: Callable[[int, Any], Any], load: Callable[[int, Any], Any]) -> None:
        self.answer, self.load = answer, load
        self.started, self.killed = 0, list[Any]()

    def put(self, thing: Any) -> Any:
        return thing

    def get(self, call: Call) -> Any:
        return call.give()

    def wait(self, calls: list[Call], timeout: float) -> tuple[list[Call], list[Call]]:
        return [call for call in calls if call.is_ready][:1], []

    def kill(self, worker: Any) -> None:
        self.killed.append(worker)

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2}

    def remote(self, **_options: Any) -> Callable[[type], Any]:
        return lambda _kind: SimpleNamespace(remote=self._start)

    def _start(self, *_arguments: Any) -> Any:
        number, self.started = self.started, self.started + 1

        def begin(recipe: Any, _work: Any) -> Call:
            call = Call(lambda: self.load(number, recipe))
            call.is_ready = number not in self.slow
            return call

        return SimpleNamespace(
            number=number,
            start=SimpleNamespace(remote=begin),
            answer=SimpleNamespace(remote=lambda item: Call(lambda: self.answer(number, item))),
        )

    slow: frozenset[int] = frozenset()


@pytest.fixture(scope="module")
def model() -> MemoryModel:
    return load(tiny_model("gpt2"), tokenizer=tiny_tokenizer(), prove=False)


def mapped(
    model: MemoryModel,
    items: int,
    answer: Callable[[int, Any], Any],
    load: Callable[[int, Any], Any] = lambda number, recipe: True,
    slow: frozenset[int] = frozenset(),
) -> tuple[list[Any], Cluster]:
    """The answers, and the cluster after all its workers were ended."""
    cluster = Cluster(answer, load)
    cluster.slow = slow
    pool = RayMapPool(cluster, RayMapper(model, 1, 2, None, 0), lambda _model, item: item)
    pool.start(pool.size)
    try:
        return list(pool.answers(iter(range(items)))), cluster
    finally:
        pool.end()
        assert sorted(worker.number for worker in cluster.killed) == list(range(cluster.started))


def lose(times: int, *, only: int | None = None) -> Callable[[int, Any], Any]:
    """Workers that die of each item so many times, or of one of them only."""
    deaths: Counter[Any] = Counter()

    def answer(_worker: int, item: Any) -> Any:
        if only in (None, item) and deaths[item] < times:
            deaths[item] += 1
            raise RayError
        return item * item

    return answer


def test_every_item_may_be_lost_three_times_and_none_a_fourth_time(model: MemoryModel) -> None:
    assert mapped(model, 5, lose(3))[0] == [0, 1, 4, 9, 16]
    with pytest.raises(
        WorkerError, match=r"was lost .RayError., as were 3 before it with the same work; mend the cause"
    ):
        mapped(model, 5, lose(4, only=3))


def test_a_worker_that_is_never_ready_is_not_waited_for(model: MemoryModel) -> None:
    found, cluster = mapped(model, 7, lambda worker, item: (worker, item), slow=frozenset({0}))
    assert found == [(1, item) for item in range(7)] and cluster.started == 2


def test_without_any_worker_it_is_said_after_a_while(model: MemoryModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_map, "START_SECONDS", 0.05)
    with pytest.raises(WorkerError, match="no Ray worker was ready within 0 seconds; the cluster has no room"):
        mapped(model, 1, lambda worker, item: item, slow=frozenset({0, 1}))


def test_workers_that_are_lost_while_they_start_are_replaced_a_few_times(model: MemoryModel) -> None:
    def fail_first(count: int) -> Callable[[int, Any], Any]:
        def load_model(number: int, _recipe: Any) -> bool:
            if number < count:
                raise RayError
            return True

        return load_model

    found, cluster = mapped(model, 3, lambda worker, item: (worker, item), fail_first(3))
    assert found == [(3, 0), (3, 1), (3, 2)] and cluster.started == 4
    with pytest.raises(WorkerError, match="as were 3 before it while they were starting"):
        mapped(model, 3, lambda worker, item: item, fail_first(9))


def test_a_node_without_the_model_gets_a_copy_and_so_do_those_that_start_later(model: MemoryModel) -> None:
    recipes: list[Any] = []

    def load_model(_number: int, recipe: Any) -> bool:
        recipes.append(recipe)
        return bool(recipe.copy)

    model.source = "/nowhere"
    try:
        found, _ = mapped(model, 4, lose(2, only=2), load_model)
    finally:
        model.source = ""
    assert found == [0, 1, 4, 9]
    assert [bool(recipe.copy) for recipe in recipes] == [False, False, True, True, True]
    assert {recipe.device for recipe in recipes} == {"cpu"}
