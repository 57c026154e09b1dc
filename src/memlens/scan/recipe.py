"""How another process gets the very model that is being scanned: from where it was loaded, or as a copy of it.

This module knows how to load; who needs the model, and where, is somebody else's business.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import Any

from memlens.errors import MemlensError, ModelError
from memlens.models.memory_model import MemoryModel
from memlens.models.tokenizer import Tokenizer


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
        from memlens.models import load

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
