"""A CPU that behaves like a host and a device: what would make the host wait for a GPU raises.

Tensors made from numbers of the host are the host's until `to_device` or `overwrite` of `engine.devices`
sends them; all others are the device's. Mixing the two is an upload by the way, for which the host waits. It
waits to read a value of the device, and for operations whose result's size depends on values. The one way
back is `engine.devices.to_host`, and counted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
SIZE_BY_VALUES = {
    aten.nonzero,
    aten.nonzero_numpy,
    aten.masked_select,
    aten.bincount,
    aten.unique_dim,
    aten._unique2,
    aten.unique_consecutive,
}
READS = {aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten.item}
READING_METHODS = {
    "numpy",
    "tolist",
    "item",
    "cpu",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
    "__contains__",
}


class Waits(Exception):
    """The host would have waited for the device here."""


class Memory:
    """Whose a tensor is. What is the host's is kept, so that its address is nobody else's."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}
        self.transfers = 0

    def give_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel():
            self._kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def is_hosts(self, tensor: torch.Tensor) -> bool:
        if tensor.numel() == 0 or tensor.is_mkldnn:  # weights packed for a CPU have no address
            return False
        return tensor.untyped_storage().data_ptr() in self._kept


def called_by(*names: str) -> bool:
    """Whether a function of engine/devices.py is among the callers."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name in names and frame.f_code.co_filename.endswith("engine/devices.py"):
            return True
        frame = frame.f_back
    return False


class _Methods(TorchFunctionMode):
    """Sees what goes through no operator: reading, and moving to where a tensor is already."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        subject = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if name in READING_METHODS and subject is not None and not self._memory.is_hosts(subject):
            if name != "cpu" or not called_by("to_host"):
                raise Waits(f"{name} of a tensor of the device")
            self._memory.transfers += 1
            return self._memory.give_host(subject.clone())
        if name in {"__getitem__", "__setitem__"}:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, list | np.ndarray) for part in index):
                raise Waits("an index that is sent to the device by the way")
        result = func(*args, **(kwargs or {}))
        if func is torch.tensor:
            return self._memory.give_host(result)
        if name == "to" and subject is not None and self._memory.is_hosts(subject) and called_by("to_device"):
            return _sent(result)
        return result


def _sent(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is the device's."""
    with torch._C._DisableTorchDispatch():
        return tensor.clone()


class _Operators(TorchDispatchMode):
    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        packet = func.overloadpacket
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        hosts = [tensor for tensor in tensors if self._memory.is_hosts(tensor)]
        of_device = [tensor for tensor in tensors if tensor.numel() and not self._memory.is_hosts(tensor)]
        if of_device and packet in SIZE_BY_VALUES | READS:
            raise Waits(str(func))
        if packet is aten.repeat_interleave and isinstance(args[-1], torch.Tensor):
            raise Waits(f"{func} with counts of the device")
        if packet in {aten.index, aten.index_put, aten.index_put_} and any(
            index is not None and index.dtype in {torch.bool, torch.uint8} for index in args[1]
        ):
            raise Waits(f"{func} by a mask")
        if of_device and any(tensor.dim() for tensor in hosts) and not called_by("overwrite"):
            raise Waits(f"{func} of tensors of the host and of the device")
        result = func(*args, **(kwargs or {}))
        if hosts and not of_device and not called_by("overwrite"):
            tree_map_only(torch.Tensor, self._memory.give_host, result)
        return result


@contextmanager
def no_waiting() -> Iterator[Memory]:
    """Raises `Waits` inside; what it gives counts transfers to the host."""
    memory = Memory()
    from_numpy = torch.from_numpy
    with (
        patch.object(torch, "from_numpy", lambda array: memory.give_host(from_numpy(array))),
        _Methods(memory),
        _Operators(memory),
    ):
        yield memory
