"""Products of a block's parameters with what it computes, as torch runs them: in a module or in a block's own code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True, eq=False)
class Product:
    """One use of a matrix of parameters, [batch, pos, ...] or [batch * pos, ...] to the same."""

    parameter: str  # its name within the block
    use: int  # counted from 0 for each parameter
    given: Tensor
    output: Tensor

    @property
    def key(self) -> tuple[str, int]:
        return self.parameter, self.use

    @property
    def name(self) -> str:
        """The module of a linear map, or the parameter that is none's."""
        return self.parameter.removesuffix(".weight")


class ProductMode(TorchFunctionMode):
    """Within, products are noted; those named in `outputs` put out that instead of their own.

    A matrix is a parameter with two dimensions or more, or what is computed from parameters alone. Only products that
    keep to positions are noted: those of another layout, such as a convolution over positions, run as they do.
    """

    def __init__(
        self, block: nn.Module, shape: Sequence[int], outputs: Mapping[tuple[str, int], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.shape, self.outputs = tuple(shape), outputs or {}
        self.products: list[Product] = []
        self._uses: Counter[str] = Counter()
        self._storages = {_storage(parameter): name for name, parameter in block.named_parameters()}
        self._made: dict[int, tuple[str, Tensor]] = {}  # by id; the tensor is kept, so that no other gets its id

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        tensors = list(_tensors((*args, *named.values())))
        names = [self._name(tensor) for tensor in tensors]
        if not any(names):
            return func(*args, **named)
        if all(names):
            output = func(*args, **named)
            if isinstance(output, Tensor) and _storage(output) not in self._storages:
                self._made[id(output)] = (next(filter(None, names)), output)
            return output
        pairs = list(zip(tensors, names, strict=True))
        given = next((tensor for tensor, name in pairs if not name and self._keeps(tensor)), None)
        matrix = next((name for tensor, name in pairs if name and sum(size > 1 for size in tensor.shape) > 1), None)
        if given is None or matrix is None:
            return func(*args, **named)
        return self._product(matrix, given.detach().clone(), lambda: func(*args, **named))

    def _product(self, parameter: str, given: Tensor, run: Any) -> Any:
        key = (parameter, self._uses[parameter])
        output = self.outputs[key].clone() if key in self.outputs else run()
        if isinstance(output, Tensor) and self._keeps(output):
            self._uses[parameter] += 1
            self.products.append(Product(*key, given, output.detach().clone()))
        return output

    def _keeps(self, tensor: Tensor) -> bool:
        """Does a tensor hold numbers by position?"""
        batch, positions = self.shape
        by_position = tensor.dim() > 2 and tensor.shape[:2] == (batch, positions)
        return tensor.is_floating_point() and (by_position or (tensor.dim() > 1 and len(tensor) == batch * positions))

    def _name(self, tensor: Tensor) -> str | None:
        name = self._storages.get(_storage(tensor))
        if name is None and id(tensor) in self._made:
            return self._made[id(tensor)][0]
        return name


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
