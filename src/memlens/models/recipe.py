"""Recipes for worker processes: a worker loads the model again from its source, or receives a copy."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memlens.errors import MemlensError, ModelError
from memlens.models.memory_model import MemoryModel
from memlens.models.tokenizer import Tokenizer
from memlens.pool import Pool, ProcessPool, RayPool, SerialPool
from memlens.settings import RunSettings


def make_pool(
    recipe: ModelRecipe, run: RunSettings, workers: int, *, check_stop: Callable[[], None] = lambda: None
) -> Pool:
    """Return a pool whose workers have the model, or a SerialPool for one local worker.

    Args:
        recipe: The model.
        run: Options of the run: executor, Ray address and GPUs.
        workers: Number of workers, or 0 for as many as fit on a Ray cluster.
        check_stop: Called several times per second. It may raise an exception to stop.
    """
    if run.executor == "ray":
        address, gpus = run.ray_address, run.gpus_per_worker
        return RayPool(recipe, workers, recipe.threads, address=address, gpus=gpus, check_stop=check_stop)
    if workers == 1:
        return SerialPool(recipe.value)
    return ProcessPool(recipe, workers, check_stop=check_stop, driver_works=recipe.value.device.type == "cuda")


class ModelRecipe:
    """A model as the source of a pool (see memlens.pool)."""

    def __init__(
        self, model: MemoryModel, threads: int, *, fingerprint: str | None = None, device_map: Any = None
    ) -> None:
        """Create a recipe.

        Args:
            model: The loaded model.
            threads: Threads that torch uses in each worker.
            fingerprint: The model's fingerprint, or None if it is not known yet.
            device_map: The device map that the model was loaded with.
        """
        self.value, self.threads, self.device_map = model, threads, device_map
        self._fingerprint = fingerprint

    def loader(self, *, copy: bool = False, gpus: float | None = None) -> ModelLoader:
        """Return a loader for workers on this machine, or on a cluster with this number of GPUs per worker.

        Raises:
            ModelError: The model or its tokenizer cannot be pickled.
        """
        model = self.value
        device = str(model.device) if gpus is None else ("cuda" if gpus else "cpu")
        if copy or not model.source:
            return ModelLoader(device, self.threads, copy=_pickle_model(model), driver_works=gpus is None)
        tokenizer = model.tokenizer if model.has_tokenizer and type(model.tokenizer) is Tokenizer else None
        _check_picklable(tokenizer)
        return ModelLoader(
            device,
            self.threads,
            model.source,
            str(model.dtype).removeprefix("torch."),
            tokenizer,
            self.device_map,
            self._fingerprint or model.fingerprint(),
            driver_works=gpus is None,
        )


@dataclass(frozen=True)
class ModelLoader:
    """A picklable function that loads the model in a worker."""

    device: str
    threads: int
    source: str = ""  # argument of load(); empty if the worker receives a copy
    dtype: str = "float32"
    tokenizer: Any = None  # None if the model's files contain the tokenizer
    device_map: Any = None
    fingerprint: str = ""
    copy: bytes = b""  # the pickled model
    driver_works: bool = False

    def __call__(self, number: int) -> MemoryModel:
        """Return the model for worker `number`.

        Workers are distributed over the GPUs in turn. The driver is a worker on the first GPU, except on a cluster.

        Raises:
            ModelError: The model at the source has changed.
        """
        import torch

        from memlens.models.load import load

        torch.set_num_threads(self.threads)
        device = self.device
        if device.startswith("cuda"):
            device = f"cuda:{gpu_of(number, torch.cuda.device_count(), self.driver_works)}"
        model: MemoryModel
        if self.copy:
            model = pickle.loads(self.copy)
            model.network.to(device)
            return model
        options = {} if self.device_map is None else {"device_map": self.device_map}
        model = load(self.source, tokenizer=self.tokenizer, device=device, dtype=self.dtype, prove=False, **options)
        if model.fingerprint() != self.fingerprint:
            raise ModelError(
                f"{self.source} has changed since the scan began; restore its files, or start over with --fresh"
            )
        return model


def gpu_of(number: int, gpus: int, driver_works: bool) -> int:
    """Return the GPU of a worker. Workers are numbered from 1, or from 0 on a cluster."""
    if gpus < 2:
        return 0
    return 1 + (number - 1) % (gpus - 1) if driver_works else number % gpus


def _pickle_model(model: MemoryModel) -> bytes:
    try:
        return pickle.dumps(model)
    except MemlensError:
        raise
    except Exception as error:  # pickling may raise any exception
        raise ModelError(
            f"{model.name} is a loaded model that cannot be copied to other processes ({type(error).__name__}); "
            "save it and pass its folder, or use --workers 1"
        ) from error


def _check_picklable(tokenizer: Any) -> None:
    try:
        pickle.dumps(tokenizer)
    except Exception as error:
        raise ModelError(
            f"{type(tokenizer).__name__} cannot be copied to other processes ({type(error).__name__}); "
            "pass the tokenizer's folder, or use --workers 1"
        ) from error
