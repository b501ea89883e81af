"""Tensors of the emulated CUDA device (`tests.emulated_cuda`), and what a program can break with them."""

from __future__ import annotations

from typing import Any

import torch

GPU = torch.device("cuda", 0)


class BrokenRule(RuntimeError):
    """A program did what CUDA would refuse, or what it was told not to do."""


class DeviceTensor(torch.Tensor):
    """A tensor of the emulated device; `inner` has its values."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> DeviceTensor:
        """Wrap a tensor of the CPU, whose memory becomes the device's."""
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device=GPU, requires_grad=inner.requires_grad,
        )  # fmt: skip
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Only within `emulated_cuda`."""
        raise BrokenRule(f"{func} with a tensor of the emulated device, outside of its emulation")

    def tolist(self) -> Any:
        """Values, for which the host waits."""
        return self.cpu().tolist()

    def pin_memory(self, device: Any = None) -> torch.Tensor:
        """Refused as CUDA does."""
        raise BrokenRule("only tensors of the host can be pinned")

    def data_ptr(self) -> int:
        """Where its values lie."""
        return self.inner.data_ptr()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """With its values."""
        return f"DeviceTensor({self.inner!r})"


def host_of(value: Any) -> Any:
    """The values of a tensor of the device; anything else as it is."""
    return value.inner if isinstance(value, DeviceTensor) else value
