"""How another process gets the very model that is being scanned: from where it was loaded, or as a copy of it.

This module knows how to load; who needs the model, and where, is somebody else's business.

Ledger: which pieces wait, and how often each was lost with a worker. The same for every kind of worker.
"""

from __future__ import annotations

import pickle
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from memlens.errors import MemlensError, ModelError, WorkerError
from memlens.models.memory_model import MemoryModel
from memlens.models.tokenizer import Tokenizer
from memlens.scanner.state import Piece


@dataclass(frozen=True)
class ModelRecipe:
    """Enough to have the model again elsewhere. Can be pickled."""

    source: str = ""  # what load() takes; "" where there is only the copy
    device: str = "cpu"
    dtype: str = "float32"
    tokenizer: Any = None  # the very one; None where the model's files alone can give it
    device_map: Any = None
    fingerprint: str = ""
    copy: bytes = b""  # the pickled model

    @classmethod
    def of(cls, model: MemoryModel, fingerprint: str, device_map: Any = None) -> ModelRecipe:
        """The recipe of a loaded model; one that was made in memory is copied."""
        if not model.source:
            return cls(device=str(model.device), fingerprint=fingerprint, copy=_pickled(model))
        tokenizer = model.tokenizer if model.has_tokenizer and type(model.tokenizer) is Tokenizer else None
        _refuse_unpicklable(tokenizer)
        dtype = str(model.dtype).removeprefix("torch.")
        return cls(model.source, str(model.device), dtype, tokenizer, device_map, fingerprint)

    def as_copy(self, model: MemoryModel) -> ModelRecipe:
        """The same, for who cannot load it from its source."""
        return self if self.copy else replace(self, source="", copy=_pickled(model))

    def load(self, number: int = 0) -> MemoryModel:
        """The model for worker `number`; of several GPUs each worker takes the next. Refused if it has changed."""
        from memlens.models.load import load

        device = _device_of(self.device, number)
        if self.copy:
            model: MemoryModel = pickle.loads(self.copy)
            model.network.to(device)
            return model
        loaded = load(
            self.source,
            tokenizer=self.tokenizer,
            device=device,
            dtype=self.dtype,
            prove=False,
            **({} if self.device_map is None else {"device_map": self.device_map}),
        )
        if loaded.fingerprint() != self.fingerprint:
            raise ModelError(
                f"{self.source} has changed since the scan began; put back what was there, or start over with --fresh"
            )
        return loaded


def _pickled(model: MemoryModel) -> bytes:
    try:
        return pickle.dumps(model)
    except MemlensError:
        raise
    except Exception as error:  # anything an object's parts may raise
        raise ModelError(
            f"{model.name} is a model in memory that cannot be copied to other processes ({type(error).__name__}); "
            "save it and name its folder, or use --workers 1"
        ) from error


def _refuse_unpicklable(tokenizer: Any) -> None:
    try:
        pickle.dumps(tokenizer)
    except Exception as error:
        raise ModelError(
            f"{type(tokenizer).__name__} cannot be copied to other processes ({type(error).__name__}); "
            "name the tokenizer's folder, or use --workers 1"
        ) from error


def _device_of(device: str, number: int) -> str:
    if not device.startswith("cuda"):
        return device
    import torch

    return f"cuda:{number % max(1, torch.cuda.device_count())}"


RETRIES = 3  # so often a piece may be lost, and so often in a row a worker may fail to start


class Ledger:
    """Pieces on their way to being done."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._fresh = iter(pieces)
        self._again: deque[Piece] = deque()
        self._lost: Counter[tuple[int, int]] = Counter()
        self._failed_starts = 0

    def take(self) -> Piece | None:
        """The next piece to do; None while there is none."""
        if self._again:
            return self._again.popleft()
        return next(self._fresh, None)

    def has_more(self) -> bool:
        """Is there a piece to take?"""
        piece = self.take()
        if piece is not None:
            self._again.appendleft(piece)
        return piece is not None

    def put_back(self, pieces: Iterable[Piece]) -> None:
        """Pieces that were handed out but not begun."""
        self._again.extend(pieces)

    def lose(self, pieces: Iterable[Piece], reason: str) -> None:
        """Pieces that a lost worker had not kept; they are done again, unless that has been tried often enough."""
        for piece in pieces:
            self._lost[piece.key] += 1
            if self._lost[piece.key] > RETRIES:
                raise WorkerError(
                    f"{reason}, and so did {RETRIES} before it at the same place (window {piece.window}); "
                    "what was done is kept: mend the cause (often memory: try fewer --workers) and run the same "
                    "command again"
                )
            self._again.append(piece)

    def started(self) -> None:
        self._failed_starts = 0

    def fail_start(self, reason: str) -> None:
        self._failed_starts += 1
        if self._failed_starts > RETRIES:
            raise WorkerError(
                f"{reason} while starting, {self._failed_starts} times in a row; what was done is kept: mend the cause "
                "(often memory: try fewer --workers) and run the same command again"
            )
