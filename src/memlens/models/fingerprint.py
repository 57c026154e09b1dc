"""One short text for one model: the same wherever its files lie, another as soon as anything that counts differs.

This module knows no architecture; what of a configuration belongs to the model, the caller says.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from memlens.models.tokenizer import Tokenizer


def fingerprint_of(config: str, tokenizer: Tokenizer | None, network: nn.Module) -> str:
    """sha256 over the configuration, the tokenizer and each parameter's name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    digest.update(config.encode())
    digest.update(b"no tokenizer" if tokenizer is None else tokenizer.serialized().encode())
    for name, parameter in sorted(network.named_parameters()):
        digest.update(f"{name} {parameter.dtype} {list(parameter.shape)}".encode())
        data: Any = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(data)
    return digest.hexdigest()
