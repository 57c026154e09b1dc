"""The pass over prefixes on another executor, before the experiments that are made of it run here.

The pass is kept in the index and used again as long as it is the same one, so experiments need not know where it ran.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from memlens.experiments.aggregate import aggregate
from memlens.experiments.prefixes import SAMPLE
from memlens.experiments.registry import find_experiments
from memlens.index.progress import Progress
from memlens.index.reader import Index
from memlens.models.memory_model import MemoryModel
from memlens.scan.mapping import Mapper
from memlens.values.table import checked_model


def pass_over_prefixes(
    index: Index,
    names: str | Sequence[str],
    model: MemoryModel | str | None,
    mapper: Callable[[MemoryModel], Mapper],
    seed: int,
    sample: int | None,
    options: Mapping[str, Any],
    progress: Progress,
) -> MemoryModel | str | None:
    """Make the pass that the named experiments will ask for, if any does; the model comes back, loaded if need be."""
    chosen = find_experiments([names] if isinstance(names, str) else list(names))
    wanted = [one for one in chosen if one.on_prefixes and one.obstacle(index) is None]
    if not wanted or seed < 0 or (sample is not None and sample < 1):  # what is wrong, the experiments will say
        return model
    loaded = checked_model(index, model)
    size = sample or wanted[0].sample or SAMPLE
    aggregate(index, loaded, sample=size, seed=seed, progress=progress, where=mapper(loaded), **options)
    return loaded
