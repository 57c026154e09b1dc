"""A device made of CPU memory, for testing the code of devices without one.

Inside `FakeDevices`, tensors can be on "mps:0", "mps:1", ... They behave like tensors of a real device: operations on
tensors of different devices fail, and so does access from numpy. With `rejects_float64`, they have no float64, as on
Apple's GPUs. `waits` counts how often the CPU would wait for the device.
"""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map, tree_map_only

KIND = "mps"
# operations whose result the CPU needs, or whose output has a size that the CPU must know
WAITING = (
    "_local_scalar_dense",
    "nonzero.default",
    "masked_select",
    "unique",
    "bincount",
    "is_nonzero",
    "equal.default",
)


class DeviceTensor(Tensor):
    """A CPU tensor that claims to be on a device."""

    inner: Tensor
    place: torch.device

    @staticmethod
    def __new__(cls, inner: Tensor, place: torch.device) -> "DeviceTensor":
        wrapper: DeviceTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            layout=inner.layout, requires_grad=inner.requires_grad,
        )  # fmt: skip
        wrapper.inner, wrapper.place = inner, place
        return wrapper

    @property  # type: ignore[misc]
    def device(self) -> torch.device:
        return self.place

    def tolist(self) -> Any:
        FakeDevices.waits += 1
        return self.inner.tolist()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"can't convert {self.place} device type tensor to numpy. Use Tensor.cpu() first.")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.inner}, {self.place})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {}, rejects_float64=False)


class FakeDevices(TorchFunctionMode):
    """Provides the fake devices inside the context.

    Copies between devices are made here, because torch itself would not know the devices. All other operations pass
    through `_Operations`.
    """

    waits = 0  # since the latest context was entered

    def __init__(self, rejects_float64: bool = True) -> None:
        super().__init__()
        self.rejects_float64 = rejects_float64

    def __enter__(self) -> "FakeDevices":
        FakeDevices.waits = 0
        self._replaces = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # parameters cannot change their device
        self._patches = ExitStack()
        self._patches.enter_context(patch("memlens.models.huggingface._check_plain_weights"))  # these reject subclasses
        # tensors of inference mode cannot be wrapped
        for name in ("__enter__", "__exit__"):
            self._patches.enter_context(patch.object(torch.inference_mode, name, getattr(torch.no_grad, name)))
        self._operations = _Operations(self.rejects_float64)
        self._operations.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._operations.__exit__(*error)
        self._patches.close()
        torch.__future__.set_overwrite_module_params_on_conversion(self._replaces)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and (device := kwargs.pop("device", None)) is not None:
            tensor = func(*args, **kwargs)
            return self._copy(tensor, torch.device(device), tensor.dtype)
        if func == Tensor.data.__set__ and isinstance(args[0], DeviceTensor):  # type: ignore[attr-defined]
            args[0].inner = args[1].inner
        if func is Tensor.cpu:
            return self._copy(args[0], torch.device("cpu"), args[0].dtype)
        if func is Tensor.to:
            options = {name: value for name, value in kwargs.items() if name != "copy"}
            if isinstance(args[1] if len(args) > 1 else kwargs.get("other"), Tensor):
                other = args[1] if len(args) > 1 else kwargs["other"]
                return self._copy(args[0], other.device, other.dtype)
            device, dtype, *_ = torch._C._nn._parse_to(*args[1:3], **options)
            return self._copy(args[0], device or args[0].device, dtype or args[0].dtype)
        return func(*args, **kwargs)

    def _copy(self, tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        device = torch.device(device.type, device.index or 0) if device.type == KIND else torch.device("cpu")
        if tensor.device == device:
            return tensor if tensor.dtype == dtype else torch.ops.aten._to_copy.default(tensor, dtype=dtype)
        inner = tensor.inner if isinstance(tensor, DeviceTensor) else tensor.detach()
        copied = inner.to(dtype) if inner.dtype != dtype else inner.clone()
        if device.type == "cpu":
            FakeDevices.waits += 1
            return copied
        check_dtype(copied, self.rejects_float64)
        return DeviceTensor(copied, device)


class _Operations(TorchDispatchMode):
    def __init__(self, rejects_float64: bool) -> None:
        super().__init__()
        self.rejects_float64 = rejects_float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {}, self.rejects_float64)


def check_dtype(tensor: Tensor, rejects_float64: bool) -> None:
    if rejects_float64 and tensor.dtype in (torch.float64, torch.complex128):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")


def waits_for_device(func: Any, args: Any) -> bool:
    """Return True if an operation would make the CPU wait for the device of its arguments."""
    is_index = str(func).startswith("aten.index.") or str(func).startswith("aten.index_put")
    is_mask = is_index and any(torch.is_tensor(one) and one.dtype == torch.bool for one in args[1])
    return is_mask or any(name in str(func) for name in WAITING)


def run(func: Any, args: Any, kwargs: dict[str, Any], rejects_float64: bool) -> Any:
    """Run an operation on the CPU and return results on the device of its arguments, or on the device it names."""
    places = list[torch.device]()
    plain = list[Tensor]()

    def unwrap(value: Any) -> Any:
        if isinstance(value, DeviceTensor):
            places.append(value.place)
            return value.inner
        if isinstance(value, Tensor) and value.dim():
            plain.append(value)
        return value

    own_args, own_kwargs = tree_map(unwrap, args), tree_map(unwrap, kwargs)
    target = places[0] if places else torch.device("cpu")
    is_copy = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
    if func is torch.ops.aten.index.Tensor and isinstance(args[0], DeviceTensor):
        plain = []  # indices may be on the CPU
    if func is torch.ops.aten.index_put.default:  # gradients of an index start from zeros that autograd creates
        plain = [tensor for tensor in plain if tensor is args[2]]
    if func is torch.ops.aten.cat.default:  # autograd fills missing gradients with zeros
        plain = [tensor for tensor in plain if tensor.any()]
    if func is torch.ops.aten.add.Tensor:  # the causal mask that torch's attention creates
        plain = [tensor for tensor in plain if not ((tensor == 0) | (tensor == -torch.inf)).all()]
    if not is_copy and (len(set(places)) > 1 or (places and plain)):
        devices = sorted({str(place) for place in places} | ({"cpu"} if plain else set()))
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {' and '.join(devices)} ({func})")
    if own_kwargs.get("device") is not None:
        target = torch.device(own_kwargs["device"])
        own_kwargs["device"] = torch.device("cpu")
        own_kwargs.pop("pin_memory", None)
    if func is torch.ops.aten.copy_.default:
        target = args[0].place if isinstance(args[0], DeviceTensor) else torch.device("cpu")
    if places and waits_for_device(func, args):
        FakeDevices.waits += 1
    output = func(*own_args, **own_kwargs)
    if target.type != KIND:
        return output
    target = torch.device(KIND, target.index or 0)

    def wrap(tensor: Tensor) -> Tensor:
        check_dtype(tensor, rejects_float64)
        return tensor if isinstance(tensor, DeviceTensor) else DeviceTensor(tensor, target)

    wrapped = tree_map_only(Tensor, wrap, output)
    return wrapped if is_copy and not places else return_and_correct_aliasing(func, args, kwargs, wrapped)
