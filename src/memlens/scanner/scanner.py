"""Worker: feeds batches of sentences to the model and adds the coefficients of their prefixes to a state.

A batch is one forward pass without the LM head; nothing is stored but what the state keeps. Sentences are cut into
batches window by window (`settings.WINDOW` sentences), before any worker is chosen.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from memlens.corpus.sentences import Batch, cut_batches
from memlens.models.groups import CoefficientBlock
from memlens.models.memory_model import MemoryModel
from memlens.scanner.lists import Candidates, make_candidates
from memlens.scanner.state import BatchRange, ScanState
from memlens.settings import ScanSettings


@dataclass(frozen=True)
class ScanSentence:
    """A sentence as the scan needs it; prefixes shorter than `fresh_from + 1` tokens are not candidates."""

    id: int
    tokens: NDArray[np.int64]
    fresh_from: int = 0


class PackedSentences(NamedTuple):
    """Sentences as a few arrays, which travel cheaply."""

    ids: NDArray[np.int64]
    tokens: NDArray[np.int32]  # all, one sentence after another
    edges: NDArray[np.int64]  # [sentences + 1]
    fresh_from: NDArray[np.int32]

    @classmethod
    def pack(cls, sentences: Sequence[ScanSentence]) -> "PackedSentences":
        edges = np.concatenate([[0], np.cumsum([len(sentence.tokens) for sentence in sentences])]).astype(np.int64)
        tokens = np.concatenate([sentence.tokens for sentence in sentences]).astype(np.int32)
        ids = np.array([sentence.id for sentence in sentences], np.int64)
        return cls(ids, tokens, edges, np.array([sentence.fresh_from for sentence in sentences], np.int32))

    def unpack(self) -> list[ScanSentence]:
        tokens, edges = self.tokens.astype(np.int64), self.edges.tolist()
        numbers = zip(self.ids.tolist(), self.fresh_from.tolist(), strict=True)
        return [ScanSentence(id_, tokens[edges[i] : edges[i + 1]], fresh) for i, (id_, fresh) in enumerate(numbers)]


class Worker:
    """Scans batches into a state of its own."""

    def __init__(self, model: MemoryModel, settings: ScanSettings, layers: Sequence[int]) -> None:
        self.model, self.settings, self.layers = model, settings, layers
        self.bos = bos_to_feed(model, settings)
        self.state = ScanState.start(model, layers, settings)
        self._number = -1  # of the window whose plan is below: ranges of one window come in a row
        self._batches: list[Batch] = []
        self._sentences: dict[int, ScanSentence] = {}

    def scan(
        self,
        batches: BatchRange,
        window: Callable[[int], Sequence[ScanSentence]],
        after_batch: Callable[[Batch], None] = lambda batch: None,
    ) -> None:
        """Scan some batches of a window; the state is whole after every batch."""
        if self._number != batches.window:
            self.plan(batches.window, window(batches.window))
        with torch.inference_mode(), _threads(self.settings.threads) as pool:
            for place in range(batches.first, batches.stop):
                self._scan_batch(self._batches[place], pool)
                self.state.done.add(batches.window, place, place + 1)
                after_batch(self._batches[place])

    def plan(self, number: int, sentences: Sequence[ScanSentence]) -> int:
        """Cut a window into batches, to be scanned next; how many there are."""
        self._number = number
        self._batches = plan_batches(sentences, self.settings, self.bos)
        self._sentences = {sentence.id: sentence for sentence in sentences}
        return len(self._batches)

    def take_state(self) -> ScanState:
        """Take the state that was added since the last call; the next batch begins anew."""
        taken, self.state = self.state, ScanState.start(self.model, self.layers, self.settings)
        return taken

    def _scan_batch(self, batch: Batch, pool: ThreadPoolExecutor | None) -> None:
        candidates = self._candidates(batch)

        def take(layer: int, block: CoefficientBlock) -> None:
            self.state.layers[layer].update(block, candidates, pool)

        tokens = torch.from_numpy(batch.tokens).to(self.model.device)
        with self.model.watch(take, list(self.state.layers)):
            self.model.run_body(tokens)
        self.state.prefixes += len(candidates.rows)
        self.state.tokens += int(batch.lengths.sum())

    def _candidates(self, batch: Batch) -> Candidates:
        """The rows of the flattened batch [batch * pos] that are candidate prefixes."""
        width, shift = batch.tokens.shape[1], 0 if self.bos is None else 1
        rows, sentences, positions = [], [], []
        for row, sentence in enumerate(batch.sentences.tolist()):
            first, last = candidate_range(self._sentences[sentence], self.settings, self.bos)
            position = np.arange(first, last)
            positions.append(position)
            rows.append(row * width + shift + position)
            sentences.append(np.full(last - first, sentence))
        return make_candidates(np.concatenate(rows), np.concatenate(sentences), np.concatenate(positions))


def bos_to_feed(model: MemoryModel, settings: ScanSettings) -> int | None:
    """The BOS id to put in front of every sentence, or None."""
    wanted = model.tokenizer.adds_bos if settings.bos == "auto" else settings.bos == "yes"
    return model.tokenizer.bos if wanted else None


def plan_batches(window: Sequence[ScanSentence], settings: ScanSettings, bos: int | None) -> list[Batch]:
    """The batches of a window, which depend on nothing else; sentences without any new prefix are not fed."""
    fed = []
    for sentence in window:
        first, last = candidate_range(sentence, settings, bos)
        if last > first:
            fed.append((sentence.id, sentence.tokens))
    return cut_batches(fed, settings.batch_tokens, bos)


def candidate_range(sentence: ScanSentence, settings: ScanSettings, bos: int | None) -> tuple[int, int]:
    """First and one past the last candidate position; -1 is the BOS-only prefix."""
    alone = settings.bos_prefix and bos is not None and sentence.fresh_from == 0
    first = -1 if alone else sentence.fresh_from
    return first, len(sentence.tokens) - (0 if settings.whole_sentence else 1)


@contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor | None]:
    """Run torch with this many threads and lend a pool of as many to the compiled pass; restored afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    pool = ThreadPoolExecutor(count) if count > 1 else None
    try:
        yield pool
    finally:
        if pool is not None:
            pool.shutdown()
        torch.set_num_threads(before)
