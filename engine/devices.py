"""Where a model runs: resolving `cpu`, `cuda` and `auto`, waiting for a device, and its memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

DeviceName = Literal["auto", "cpu", "cuda"]

CPU = torch.device("cpu")


class DeviceUnavailable(Exception):
    """A device was asked for that this process does not have; the message says what to do."""


def resolve_device(name: str | torch.device) -> torch.device:
    """The device that a configuration's name stands for.

    `auto` is the first GPU that this process sees, the CPU if it sees none. A worker of a cell sees only the
    GPUs it has reserved (through CUDA_VISIBLE_DEVICES), so `cuda` is always index 0 there.

    Args:
        name: `auto`, `cpu`, `cuda`, `cuda:1`, or any device of torch.

    Raises:
        DeviceUnavailable: if it is a GPU and there is no such one.
    """
    if isinstance(name, str) and name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        build = "this build of torch has no CUDA" if torch.version.cuda is None else "CUDA finds no GPU here"
        raise DeviceUnavailable(
            f"device `{name}` is not there: {build}. Use `device: cpu`; in a cell, reserve a GPU with "
            "`placement.num_gpus`, for workers that reserve none see no GPU"
        )
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise DeviceUnavailable(
            f"device `{name}` is not there: this process sees {torch.cuda.device_count()} GPU(s), from cuda:0"
        )
    return torch.device("cuda", index)


def see_only_gpu(number: int) -> None:
    """Hide all GPUs but the `number`-th of those visible, from 0, as Ray does for an actor that reserves one.

    Only in a process that has not used CUDA yet. Without so many GPUs nothing is hidden.
    """
    visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    if not visible:
        visible = [str(index) for index in range(torch.cuda.device_count())]
    if number < len(visible):
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[number]


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on `device` is done; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Times what is launched on a device between two moments, without waiting for it.

    On a GPU from event to event on the current stream; on a CPU, where nothing runs behind, by the clock.
    """

    def __init__(self, device: torch.device) -> None:
        """Start now."""
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events[0].record()
        self._started = self._stopped = time.perf_counter()

    def stop(self) -> None:
        """End now."""
        if self._events is not None:
            self._events[1].record()
        self._stopped = time.perf_counter()

    @property
    def has_stopped(self) -> bool:
        """Whether `seconds` would not wait."""
        return self._events is None or self._events[1].query()

    def seconds(self) -> float:
        """Between the two; on a GPU, waits until what came before the second is done."""
        if self._events is None:
            return self._stopped - self._started
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


def seconds_of(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Run something once: seconds until it was done, and seconds the device took for it.

    On a GPU the second is without what the host did before its first kernel; on a CPU both are the same.
    """
    synchronize(device)
    start = time.perf_counter()
    watch = Stopwatch(device)
    run()
    watch.stop()
    on_device = watch.seconds()
    return (time.perf_counter() - start, on_device) if device.type == "cuda" else (on_device, on_device)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a device.

    Attributes:
        total: of all.
        free: nobody's, counting what this process's allocator keeps without using it.
        own: in use by tensors of this process.
    """

    total: int
    free: int
    own: int


def memory_of(device: torch.device) -> Memory:
    """How much memory the device has now; for a CPU, of the machine."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_allocated(device)
        return Memory(total, free + torch.cuda.memory_reserved(device) - own, own)
    page = os.sysconf("SC_PAGE_SIZE")
    return Memory(page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES"), 0)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`; to a GPU from pinned memory, so that the host does not wait."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def staging(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of the host, [size], to be written and then copied to `device` without waiting."""
    return torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")


def index_on(numbers: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Integers of the host as int64 on `device`, as indices are."""
    return to_device(torch.from_numpy(numbers.astype(np.int64)), device)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of any device on the host, which waits until all that was queued before it is done."""
    return tensor.cpu()


class Transfer:
    """A tensor on its way to the host, which goes on meanwhile.

    From a GPU into pinned memory, in the order of the current stream; elsewhere the host has it at once.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        """Queue it behind what computes `tensor`."""
        self._arrived: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._on_host = to_host(tensor)
            return
        self._on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._on_host.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    @property
    def has_arrived(self) -> bool:
        """Whether `wait` would not wait."""
        return self._arrived is None or self._arrived.query()

    def wait(self) -> torch.Tensor:
        """The tensor on the host, which waits until it is there; what was queued behind goes on."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._on_host


def overwrite(tensor: torch.Tensor, values: NDArray[Any]) -> None:
    """Put an array of the host into a tensor of as many elements; on a GPU without waiting for it."""
    source = torch.from_numpy(np.ascontiguousarray(values)).view(tensor.shape)
    if tensor.device.type == "cuda":
        source = source.pin_memory()
    tensor.copy_(source, non_blocking=True)
