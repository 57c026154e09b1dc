"""What runs on a node of a Ray cluster: the same worker as everywhere, asked by calls; and the merging of two states.

Plain Python that does not know ray: on_ray makes actors and tasks of it.

Ray workers: pieces on the nodes of a Ray cluster; the only file that imports ray.

The model is loaded once a worker, from where it was loaded here, or as a copy through the object store where a node
does not have it. Windows travel through the object store, so nodes share no file system. At intervals all workers hand
over what they have found; it is merged as a tree on the cluster, and the driver takes in the root and keeps it as the
one part of this run. So the driver never holds more than three states, and what it has kept outlives it. What a lost
worker or node had not handed over goes to others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from memlens import __version__
from memlens.errors import MemlensError, SettingError, WorkerError
from memlens.scanner.executors import Ledger, ModelRecipe
from memlens.scanner.scanner import SaveTimes, ScanJob, WindowSentence, Worker
from memlens.scanner.settings import ScanSettings
from memlens.scanner.state import LayerShape, Piece, ScanState, shapes_of

Arrays = dict[str, NDArray[Any]]


class RayOrder(NamedTuple):
    """What all workers of a scan are told at first."""

    settings: ScanSettings
    layers: tuple[int, ...]
    versions: tuple[str, str]

    @classmethod
    def make(cls, settings: ScanSettings, layers: tuple[int, ...]) -> RayOrder:
        return cls(settings, layers, _versions())


def _versions() -> tuple[str, str]:
    return __version__, torch.__version__


class PackedWindow(NamedTuple):
    """The sentences of a window as a few arrays, which travel cheaply."""

    ids: NDArray[np.int64]
    tokens: NDArray[np.int32]  # all, one sentence after another
    edges: NDArray[np.int64]  # [sentences + 1]
    fresh_from: NDArray[np.int32]


def pack_window(window: Sequence[WindowSentence]) -> PackedWindow:
    edges = np.concatenate([[0], np.cumsum([len(sentence.tokens) for sentence in window])]).astype(np.int64)
    tokens = np.concatenate([sentence.tokens for sentence in window]).astype(np.int32)
    ids = np.array([sentence.id for sentence in window], np.int64)
    return PackedWindow(ids, tokens, edges, np.array([sentence.fresh_from for sentence in window], np.int32))


def unpack_window(packed: PackedWindow) -> list[WindowSentence]:
    tokens, edges = packed.tokens.astype(np.int64), packed.edges.tolist()
    numbers = zip(packed.ids.tolist(), packed.fresh_from.tolist(), strict=True)
    return [WindowSentence(id_, tokens[edges[i] : edges[i + 1]], fresh) for i, (id_, fresh) in enumerate(numbers)]


class RayWorker:
    """A worker that is asked by calls, one after another."""

    def __init__(self, order: RayOrder) -> None:
        self.order = order
        self.worker: Worker | None = None

    def start(self, recipe: ModelRecipe) -> bool:
        """Load the model; False if this node does not have it."""
        if self.order.versions != _versions():
            theirs, ours = ("memlens {} with torch {}".format(*v) for v in (_versions(), self.order.versions))
            raise WorkerError(f"a Ray node has {theirs}, the driver {ours}; results would differ: install the same")
        torch.set_num_threads(self.order.settings.threads)
        try:
            model = recipe.load()
        except MemlensError:
            if recipe.copy:
                raise
            return False
        self.worker = Worker(model, self.order.settings, self.order.layers)
        return True

    def scan(self, piece: Piece, window: PackedWindow) -> int:
        """Do a piece; how many tokens were fed comes back."""
        assert self.worker is not None, "start comes first"
        before = self.worker.state.tokens
        self.worker.scan(piece, lambda number: unpack_window(window), lambda batch: None)
        return self.worker.state.tokens - before

    def hand_over(self) -> Arrays:
        """What was found since the last time."""
        assert self.worker is not None, "start comes first"
        return self.worker.take_state().arrays()


def merge_states(order: RayOrder, shapes: Mapping[int, LayerShape], one: Arrays, other: Arrays) -> Arrays:
    """Two disjoint states as one; needs no model."""
    states = []
    for arrays in (one, other):
        state = ScanState.empty(shapes, order.settings)
        state.restore_(arrays)
        states.append(state)
    states[0].merge(states[1])
    return states[0].arrays()


_AHEAD = 2  # pieces that a worker has, so that it never waits for the driver
_LOOK = 0.2  # seconds between two looks whether somebody wants to stop
_WINDOWS = 4  # that are kept in the object store
START_SECONDS = 300.0  # so long no worker at all may be there


class RayWorkers:
    """The executor on a Ray cluster; `workers` 0 is as many as it has room for."""

    def __init__(self, workers: int, address: str | None, gpus_per_worker: float) -> None:
        self.workers, self.address, self.gpus = workers, address, gpus_per_worker
        _ray()  # a missing package is said before anything is read

    def run(self, job: ScanJob) -> None:
        with connected(self.address) as ray:
            fleet = _Fleet(ray, job, self.workers, self.gpus)
            try:
                fleet.work()
            finally:
                fleet.end()


def _ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise SettingError('--executor ray needs the package ray: pip install "memlens[ray]"') from error
    return ray


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Ray, connected to the cluster; a connection that was there before is used and left as it is."""
    ray = _ray()
    if ray.is_initialized():
        yield ray
        return
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=True)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WorkerError(
            f"the Ray cluster {address or ''} cannot be reached ({reason}); check --ray-address"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


@dataclass(eq=False)
class _Hand:
    """One worker as the driver sees it."""

    actor: Any
    starting: Any  # the call that loads the model; None when it is done
    calls: dict[Any, Piece] = field(default_factory=dict)  # under way, in this order
    unsaved: list[Piece] = field(default_factory=list)  # done since the worker last handed over
    handed: set[Any] = field(default_factory=set)  # calls that a handover comes after: their pieces are in it


@dataclass
class _Handover:
    """What workers have handed over, on its way to the driver."""

    root: Any
    leaves: list[tuple[Any, list[Piece]]]  # each worker's state, and what is in it


class _Fleet:
    """The workers of one job."""

    def __init__(self, ray: Any, job: ScanJob, size: int, gpus: float) -> None:
        self.ray, self.job = ray, job
        self.ledger = Ledger(job.pieces)
        self.shapes = shapes_of(job.model, job.layers, job.settings)
        self.state = ScanState.empty(self.shapes, job.settings)
        self.name = job.keeper.new_name()
        self.times = SaveTimes(job.save_seconds)
        self.hands: list[_Hand] = []
        self.handover: _Handover | None = None
        self.windows: dict[int, Any] = {}
        self.copy: Any = None
        self.recipe = ray.put(replace(job.recipe(), device="cuda" if gpus else "cpu"))
        self.order = ray.put(RayOrder.make(job.settings, job.layers))
        threads = job.settings.threads
        self.size = size or room_for(ray, threads, gpus)
        self.make = ray.remote(
            num_cpus=0 if gpus else threads, num_gpus=gpus, max_restarts=0, scheduling_strategy="SPREAD"
        )(RayWorker)
        self.merge = ray.remote(num_cpus=0, max_retries=3)(merge_states)
        self.last_sign = time.monotonic()  # when a worker last gave one

    def work(self) -> None:
        """Until every piece is kept."""
        while True:
            if self.ledger.has_more():
                while len(self.hands) < self.size:
                    self._hire()
            self._supply()
            calls = [call for hand in self.hands for call in hand.calls]
            if not calls and not self.ledger.has_more() and self.handover is None:
                if not any(hand.unsaved for hand in self.hands):
                    return
                self._begin_handover()
            elif self.handover is None and self.times.is_due():
                self._begin_handover()
            self._listen()
            if self.job.stop.stopped:
                self._stop()

    def _hire(self) -> None:
        actor = self.make.remote(self.order)
        self.hands.append(_Hand(actor, actor.start.remote(self.recipe)))

    def _supply(self) -> None:
        for hand in self.hands:
            while hand.starting is None and len(hand.calls) < _AHEAD:
                piece = self.ledger.take()
                if piece is None:
                    return
                hand.calls[hand.actor.scan.remote(piece, self._window(piece.window))] = piece

    def _window(self, number: int) -> Any:
        if number not in self.windows:
            while len(self.windows) >= _WINDOWS:
                del self.windows[next(iter(self.windows))]
            self.windows[number] = self.ray.put(pack_window(self.job.windows.window(number)))
        return self.windows[number]

    def _listen(self) -> None:
        by_call: dict[Any, _Hand | None] = {call: hand for hand in self.hands for call in hand.calls}
        by_call |= {hand.starting: hand for hand in self.hands if hand.starting is not None}
        if self.handover is not None:
            by_call[self.handover.root] = None
        if not by_call:
            return
        ready, _ = self.ray.wait(list(by_call), num_returns=len(by_call), timeout=_LOOK)
        for call in ready:
            hand = by_call[call]
            if hand is None:
                self._end_handover()
            elif hand in self.hands:  # else it was found dead by an earlier call
                self._hear(hand, call)
        if any(hand.starting is None for hand in self.hands):
            self.last_sign = time.monotonic()
        elif time.monotonic() - self.last_sign > START_SECONDS:
            raise WorkerError(
                f"no Ray worker has started for {START_SECONDS:.0f} seconds; the cluster has no room for one with "
                f"{self.job.settings.threads} threads: wait, or try fewer --threads"
            )

    def _hear(self, hand: _Hand, call: Any) -> None:
        """The answer to one call; a worker that has none is lost."""
        try:
            answer = self.ray.get(call)
        except self.ray.exceptions.RayTaskError as error:
            raise own_error(error) from error
        except self.ray.exceptions.RayError as error:
            self._lose(hand, f"a Ray worker was lost ({type(error).__name__})")
            return
        if call is hand.starting:
            # A node that lacks the model, or has another one under its name, gets a copy.
            hand.starting = None if answer else hand.actor.start.remote(self._copy())
            self.ledger.started()
        else:
            piece = hand.calls.pop(call)
            if call in hand.handed:
                hand.handed.remove(call)
            else:
                hand.unsaved.append(piece)
            self.job.on_tokens(answer)

    def _copy(self) -> Any:
        if self.copy is None:
            self.copy = self.ray.put(self.job.recipe().as_copy(self.job.model))
        return self.copy

    def _lose(self, hand: _Hand, reason: str) -> None:
        self.hands.remove(hand)
        self.ray.kill(hand.actor)
        if hand.starting is not None:
            self.ledger.fail_start(reason)
        # What the worker was asked to hand over is lost or not with that handover.
        under_way = [piece for call, piece in hand.calls.items() if call not in hand.handed]
        self.ledger.lose([*hand.unsaved, *under_way], reason)

    def _begin_handover(self) -> None:
        """Ask every worker for what it has; calls of one worker are answered in their order."""
        leaves = []
        for hand in self.hands:
            under_way = [piece for call, piece in hand.calls.items() if call not in hand.handed]
            if hand.unsaved or under_way:
                leaves.append((hand.actor.hand_over.remote(), [*hand.unsaved, *under_way]))
                hand.unsaved, hand.handed = [], set(hand.calls)
        if not leaves:
            self.times.saved(time.monotonic())
            return
        level = [leaf for leaf, _pieces in leaves]
        while len(level) > 1:
            pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
            level = [self.merge.remote(self.order, self.shapes, *pair) if len(pair) == 2 else pair[0] for pair in pairs]
        self.handover = _Handover(level[0], leaves)

    def _end_handover(self) -> None:
        """Take in the root; where a part of the tree was lost, what is left of its leaves; the rest is done again."""
        assert self.handover is not None
        began, before = time.monotonic(), len(self.state.done)
        leaves, root = self.handover.leaves, self.handover.root
        self.handover = None
        if not self._take_in(root):
            for leaf, _pieces in leaves:
                self._take_in(leaf)
        if len(self.state.done) > before:
            self.job.keeper.keep(self.name, self.state.arrays())
        self.times.saved(began)
        # Asked of the state itself: a worker may have handed over although one of its pieces had failed.
        left = [rest for _leaf, pieces in leaves for piece in pieces for rest in self.state.done.left_of(piece)]
        self.ledger.lose(left, "a Ray worker was lost before it had handed over what it found")

    def _take_in(self, ref: Any) -> bool:
        part = ScanState.empty(self.shapes, self.job.settings)
        try:
            part.restore_(self.ray.get(ref))
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, (self.ray.exceptions.RayError, type(None))):
                return False
            raise own_error(error) from error
        except self.ray.exceptions.RayError:
            return False
        self.state.merge(part)
        return True

    def _stop(self) -> None:
        """Let every worker finish its pieces and hand over, then raise."""
        for hand in [hand for hand in self.hands if hand.starting is not None]:
            self.hands.remove(hand)
            self.ray.kill(hand.actor)
        while any(hand.calls for hand in self.hands) or self.handover is not None:
            self._listen()
        self._begin_handover()
        while self.handover is not None:
            self._listen()
        self.job.stop.check()

    def end(self) -> None:
        """End whoever is left, at once."""
        for hand in self.hands:
            self.ray.kill(hand.actor)
        self.hands = []


def room_for(ray: Any, threads: int, gpus: float) -> int:
    """How many workers the cluster has room for, one at least."""
    resources = ray.cluster_resources()
    room = resources.get("GPU", 0) / gpus if gpus else resources.get("CPU", 1) / threads
    if gpus and room < 1:
        raise SettingError(f"--gpus-per-worker is {gpus}, but the Ray cluster has {resources.get('GPU', 0):g} GPUs")
    return max(1, int(room))


def own_error(error: Any) -> Exception:
    """What a worker refused, as the same error; anything else is a bug."""
    cause = error.cause
    if isinstance(cause, MemlensError):
        return type(cause)(str(cause))
    if isinstance(cause, MemoryError):
        return WorkerError("a Ray worker has not enough memory; try fewer workers a node or smaller --batch-tokens")
    return RuntimeError(f"a Ray worker failed:\n{error}")
