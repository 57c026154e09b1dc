"""A .gguf file, as llama.cpp uses them, read into plain weights by transformers.

Whether BOS goes before a text stands in the file's own metadata. Quantized weights are unpacked: the model is read as
the file holds it, rounding included. This module knows the container, not the architectures in it.
"""

from __future__ import annotations

import contextlib
import io
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlens.errors import ModelError
from memlens.models.checkpoint import one_line, read_config, read_network, read_tokenizer
from memlens.models.hugging_face import HuggingFaceModel
from memlens.models.refusal import family_of
from memlens.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

_ADDS_BOS = "tokenizer.ggml.add_bos_token"


def load_gguf(path: Path, tokenizer: Tokenizer | None, device: torch.device, dtype: torch.dtype) -> HuggingFaceModel:
    """The model and the tokenizer of one .gguf file."""
    fields = _read_fields(path)
    folder, file = str(path.resolve().parent), path.name
    config = read_config(folder, file, gguf_file=file)
    family_of(config, file)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no setting of transformers reaches
        network = read_network(folder, file, dtype, gguf_file=file)
    if tokenizer is None:
        adds_bos = _value(fields[_ADDS_BOS]) if _ADDS_BOS in fields else None
        tokenizer = read_tokenizer(folder, gguf_file=file, adds_bos=adds_bos)
    return HuggingFaceModel(network.to(device), tokenizer, name=file, source=str(path.resolve()))


def _read_fields(path: Path) -> dict[str, Any]:
    try:
        import_module("accelerate")  # transformers reads .gguf files with it
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        raise ModelError(f'{path} needs the package {error.name}: pip install "memlens[gguf]"') from error
    try:
        return dict(GGUFReader(path).fields)
    except Exception as error:  # a damaged file makes the reader stumble over anything
        raise ModelError(f"{path} is not a readable .gguf file ({one_line(error)}); get it again") from error


def _value(field: Any) -> bool:
    return bool(field.parts[field.data[0]][0])
