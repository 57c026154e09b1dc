"""How large a model is, from its configuration alone: nothing is downloaded or loaded but that.

The network is made without any memory behind it, by the same code that would load it, so the numbers are exact. Of a
.gguf file or a fairseq checkpoint only the size of the file is known beforehand. This module estimates no time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memlens.errors import MemlensError
from memlens.models.loading import bundled_folder


@dataclass(frozen=True)
class ModelSizes:
    """What a model will take; without layers where only its file was looked at."""

    parameters: int
    memories: tuple[int, ...] = ()  # by layer
    width: int = 0
    gated: bool = False


def sizes_before_loading(model: str | os.PathLike[str]) -> ModelSizes | None:
    """The sizes of a checkpoint that is not loaded yet; None where they cannot be known without loading it."""
    name = os.fspath(model)
    place = bundled_folder() if name == "bundled" else Path(name).expanduser()
    if place.is_file() or (place / "model.pt").is_file():
        file = place if place.is_file() else place / "model.pt"
        return ModelSizes(file.stat().st_size // 4)
    try:
        return _from_configuration(str(place) if place.is_dir() else name)
    except MemlensError:
        return None  # loading will say why


def _from_configuration(place: str) -> ModelSizes:
    import torch
    from transformers import AutoModelForCausalLM

    from memlens.models.checkpoint import read_config
    from memlens.models.hugging_face import feed_forwards
    from memlens.models.quiet import quiet_transformers
    from memlens.models.refusal import family_of

    config = read_config(place, place)
    family = family_of(config, place)
    with quiet_transformers(), torch.device("meta"):
        network: Any = AutoModelForCausalLM.from_config(config)
    layers = feed_forwards(network, family, config, place)
    return ModelSizes(
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        memories=tuple(layer.memories for layer in layers),
        width=layers[0].values.shape[1] if layers else 0,
        gated=bool(layers) and layers[0].gated,
    )
