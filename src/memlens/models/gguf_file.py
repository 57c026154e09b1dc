"""The head of a .gguf file: its settings and its tensors' shapes, with every count checked before it is believed.

The readers of gguf and transformers take counts and lengths in a file at their word, and would fill the memory of
whoever opens a file that lies. So the head is walked here first; what it says must fit into the file.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch

from memlens.errors import ModelError

_MOST_ENTRIES = 1 << 24  # of all lists together: a vocabulary has a few hundred thousand
_MOST_SIDES = 4  # of a tensor
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_LAYERS, _ADDS_BOS = ".block_count", "tokenizer.ggml.add_bos_token"


@dataclass
class GgufHead:
    """The head of a .gguf file: all that stands in front of the numbers."""

    settings: dict[str, int | float | bool] = field(default_factory=dict)  # texts and lists are left out
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # shapes only

    @property
    def adds_bos(self) -> bool | None:
        """Does BOS go before a text? None where the file does not say."""
        stated = self.settings.get(_ADDS_BOS)
        return None if stated is None else bool(stated)


def read_head(path: Path) -> GgufHead:
    """The head of a file; refused where it cannot be right."""
    try:
        with path.open("rb") as file:
            head = _Walk(file, path.stat().st_size).head()
    except (OSError, ValueError, struct.error) as error:
        raise ModelError(f"{path} is not a readable .gguf file ({error}); get it again") from error
    counts = [count for name, count in head.settings.items() if name.endswith(_LAYERS)]
    there = len({name.split(".")[1] for name in head.tensors if name.startswith("blk.")})
    if counts and counts[0] != there:  # transformers would pass over the others, or make lists of any length
        raise ModelError(f"{path} says that it has {counts[0]:,} layers, but holds weights of {there:,}; get it again")
    return head


def _packings() -> Mapping[int, tuple[int, int]]:
    """(numbers, bytes) of a block of each packing; none without the package that also unpacks them."""
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError:
        return {}
    sizes: Mapping[int, tuple[int, int]] = GGML_QUANT_SIZES
    return sizes


class _Walk:
    """Reads one value after another, and none that is longer than what is left of the file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.left = file, size
        self.entries = 0

    def head(self) -> GgufHead:
        if self._bytes(4) != b"GGUF" or self._number("I") not in (2, 3):
            raise ValueError("it does not begin as one of version 2 or 3 does")
        tensors, settings = self._count(24, "tensors"), self._count(13, "settings")
        head = GgufHead()
        for _ in range(settings):
            name, kind = self._text(), int(self._number("I"))
            if kind in _SCALARS:
                head.settings[name] = self._number(_SCALARS[kind])
            else:
                self._pass_over(kind)
        end = 0
        for name, shape, size in self._shapes(tensors):
            head.tensors[name] = torch.empty(shape, device="meta")
            end = max(end, size)
        if end > self.left:
            raise ValueError(f"its tensors take {end:,} bytes, but only {self.left:,} are there")
        return head

    def _shapes(self, count: int) -> Iterator[tuple[str, list[int], int]]:
        """(name, shape, where it ends behind the head) of every tensor."""
        packings = _packings()
        for _ in range(count):
            name, sides = self._text(), int(self._number("I"))
            if sides > _MOST_SIDES:
                raise ValueError(f"the tensor {name[:60]} has {sides} sides")
            shape = [int(self._number("Q")) for _ in range(sides)]
            packing, begin = int(self._number("I")), int(self._number("Q"))
            if any(side > 1 << 40 for side in shape):
                raise ValueError(f"the tensor {name[:60]} is {shape}")
            numbers, size = packings.get(packing, (1, 0))  # transformers refuses what it cannot unpack
            yield name, shape, begin + math.prod(shape) // numbers * size

    def _pass_over(self, kind: int) -> None:
        if kind == _TEXT:
            self._text()
            return
        if kind != _LIST:
            raise ValueError(f"a setting is of the unknown kind {kind}")
        inner = int(self._number("I"))
        width = 8 if inner == _TEXT else struct.calcsize(_SCALARS.get(inner, ""))
        if not width:
            raise ValueError(f"a list is of the unknown kind {inner}")
        count = self._count(width, "entries of a list")
        self.entries += count
        if self.entries > _MOST_ENTRIES:
            raise ValueError(f"its lists have more than {_MOST_ENTRIES:,} entries")
        if inner == _TEXT:
            for _ in range(count):
                self._text()
        else:
            self._skip(count * width)

    def _text(self) -> str:
        return self._bytes(self._count(1, "bytes of a text")).decode("utf-8", "replace")

    def _count(self, width: int, what: str) -> int:
        """A count of things that take so many bytes each at least."""
        count = int(self._number("Q"))
        if count * width > self.left:
            raise ValueError(f"it announces {count:,} {what}, more than fit into it")
        return count

    def _number(self, form: str) -> int | float:
        number: int | float = struct.unpack(f"<{form}", self._bytes(struct.calcsize(form)))[0]
        return number

    def _bytes(self, count: int) -> bytes:
        self.left -= count
        if self.left < 0:
            raise ValueError("it ends too early")
        return self.file.read(count)

    def _skip(self, count: int) -> None:
        self.left -= count
        self.file.seek(count, 1)
