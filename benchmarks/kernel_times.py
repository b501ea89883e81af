"""Which kernels a call's time goes to, by PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from engine.devices import synchronize


@dataclass(frozen=True, slots=True)
class KernelTime:
    """What one kernel takes of a call; on a CPU, what one operator does without those it calls.

    Attributes:
        name: of the kernel, as it was compiled.
        launches: per call.
        us: microseconds per call, of all its launches.
    """

    name: str
    launches: float
    us: float


def kernel_times(call: Callable[[], object], device: torch.device, repeats: int = 5) -> list[KernelTime]:
    """Kernels of a call, the longest first: means over `repeats` calls.

    Kernels of replayed CUDA graphs are among them. Times between kernels are in none.
    """
    on_gpu = device.type == "cuda"
    call()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        for _ in range(repeats):
            call()
        synchronize(device)
    kernels = [
        KernelTime(
            name=one.key,
            launches=one.count / repeats,
            us=(one.self_device_time_total if on_gpu else one.self_cpu_time_total) / repeats,
        )
        for one in found.key_averages()
    ]
    return sorted((one for one in kernels if one.us > 0), key=lambda one: -one.us)
