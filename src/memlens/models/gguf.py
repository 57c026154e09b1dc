"""The head of a .gguf file: its settings and the shapes of its tensors, with every count checked against the file size.

The readers in gguf and transformers trust the counts and lengths in a file, so a crafted file could exhaust memory.
`read_head` therefore checks the head before they open the file.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch

from memlens.errors import ModelError

_MOST_ENTRIES = 1 << 24  # maximum number of entries of all lists; a vocabulary has a few hundred thousand
_MOST_DIMENSIONS = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_LAYERS, _ADDS_BOS = ".block_count", "tokenizer.ggml.add_bos_token"


@dataclass
class GgufHead:
    """The head of a .gguf file: everything before the data."""

    settings: dict[str, int | float | bool] = field(default_factory=dict)  # settings that are neither texts nor lists
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # name -> tensor with a shape but without data

    @property
    def adds_bos(self) -> bool | None:
        """True if texts start with BOS, or None if the file has no such setting."""
        stated = self.settings.get(_ADDS_BOS)
        return None if stated is None else bool(stated)


def read_head(path: Path) -> GgufHead:
    """Return the head of a .gguf file.

    Raises:
        ModelError: The head is damaged or does not match the size of the file, or this is not a regular file.
    """
    if path.exists() and not path.is_file():  # opening a FIFO would wait forever
        raise ModelError(f"{path} is not a regular file; use a .gguf file or a folder with config.json")
    try:
        with path.open("rb") as file:
            head = _HeadReader(file, path.stat().st_size).head()
    except (OSError, ValueError, struct.error) as error:
        raise ModelError(f"{path} is not a readable .gguf file ({error}); download it again") from error
    counts = [count for name, count in head.settings.items() if name.endswith(_LAYERS)]
    layers = len({name.split(".")[1] for name in head.tensors if name.startswith("blk.")})
    if counts and counts[0] != layers:  # transformers would ignore extra layers, or create lists of the declared length
        raise ModelError(f"{path} declares {counts[0]:,} layers but contains weights for {layers:,}; download it again")
    return head


def _block_sizes() -> Mapping[int, tuple[int, int]]:
    """Return (numbers, bytes) per block of each quantization.

    The result is empty if the gguf package is not installed.
    """
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError:
        return {}
    sizes: Mapping[int, tuple[int, int]] = GGML_QUANT_SIZES
    return sizes


class _HeadReader:
    """Reads values one after another and rejects values that are longer than the rest of the file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.remaining = file, size
        self.entries = 0

    def head(self) -> GgufHead:
        if self._bytes(4) != b"GGUF" or self._number("I") not in (2, 3):
            raise ValueError("it does not start with the header of GGUF version 2 or 3")
        tensors, settings = self._count(24, "tensors"), self._count(13, "settings")
        head = GgufHead()
        for _ in range(settings):
            name, kind = self._text(), int(self._number("I"))
            if kind in _SCALARS:
                head.settings[name] = self._number(_SCALARS[kind])
            else:
                self._skip_value(kind)
        end = 0
        for name, shape, size in self._shapes(tensors):
            head.tensors[name] = torch.empty(shape, device="meta")
            end = max(end, size)
        if end > self.remaining:
            raise ValueError(f"its tensors need {end:,} bytes, but only {self.remaining:,} remain")
        return head

    def _shapes(self, count: int) -> Iterator[tuple[str, list[int], int]]:
        """Yield (name, shape, offset at which its data ends, counted from the end of the head) for every tensor."""
        block_sizes = _block_sizes()
        for _ in range(count):
            name, dimensions = self._text(), int(self._number("I"))
            if dimensions > _MOST_DIMENSIONS:
                raise ValueError(f"the tensor {name[:60]} has {dimensions} dimensions, more than {_MOST_DIMENSIONS}")
            shape = [int(self._number("Q")) for _ in range(dimensions)]
            kind, begin = int(self._number("I")), int(self._number("Q"))
            if any(side > 1 << 40 for side in shape):
                raise ValueError(f"the tensor {name[:60]} has the impossible shape {shape}")
            numbers, size = block_sizes.get(kind, (1, 0))  # transformers rejects unknown kinds
            yield name, shape, begin + math.prod(shape) // numbers * size

    def _skip_value(self, kind: int) -> None:
        if kind == _TEXT:
            self._text()
            return
        if kind != _LIST:
            raise ValueError(f"a setting has the unknown type {kind}")
        inner = int(self._number("I"))
        width = 8 if inner == _TEXT else struct.calcsize(_SCALARS.get(inner, ""))
        if not width:
            raise ValueError(f"a list has the unknown type {inner}")
        count = self._count(width, "entries of a list")
        self.entries += count
        if self.entries > _MOST_ENTRIES:
            raise ValueError(f"its lists have more than {_MOST_ENTRIES:,} entries")
        if inner == _TEXT:
            for _ in range(count):
                self._text()
        else:
            self.remaining -= count * width  # `_count` has checked that enough bytes remain
            self.file.seek(count * width, 1)

    def _text(self) -> str:
        return self._bytes(self._count(1, "bytes of a text")).decode("utf-8", "replace")

    def _count(self, width: int, items: str) -> int:
        """Read a count of items that take at least `width` bytes each."""
        count = int(self._number("Q"))
        if count * width > self.remaining:
            raise ValueError(f"it declares {count:,} {items}, more than the file can hold")
        return count

    def _number(self, form: str) -> int | float:
        number: int | float = struct.unpack(f"<{form}", self._bytes(struct.calcsize(form)))[0]
        return number

    def _bytes(self, count: int) -> bytes:
        self.remaining -= count
        if self.remaining < 0:
            raise ValueError("it ends too early")
        return self.file.read(count)
