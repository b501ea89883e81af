"""What searches for the fastest tiles of a kernel share: compiling many side by side, and timing launches."""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

import torch

from engine.capturing import captured
from engine.devices import Stopwatch, seconds_of

#: Bytes read between two uses of the same numbers, at least: several times a GPU's cache.
BEYOND_CACHES = 256 << 20
#: A kernel that is to be compiled, as the search names it.
K = TypeVar("K", bound=Hashable)


def compile_all(
    kernels: Sequence[K], compile_one: Callable[[K], str | None], workers: int
) -> dict[K, str | None]:
    """Compile them, by so many processes or by this one if 0.

    Args:
        kernels: each is compiled once.
        compile_one: compiles one, and returns what is wrong with it or None. It goes to other processes.
        workers: processes.

    Returns:
        What is wrong with each.
    """
    if workers == 0:
        return {kernel: compile_one(kernel) for kernel in kernels}
    with ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        started = {kernel: pool.submit(compile_one, kernel) for kernel in kernels}
        found: dict[K, str | None] = {}
        for kernel, future in started.items():
            try:
                found[kernel] = future.result()
            except BrokenProcessPool:  # the compiler has ended one: which kernel it was is not said
                found[kernel] = "a process that compiles has ended"
        return found


def show_unfit(wrong: Mapping[K, str | None], seconds: float, show: Callable[[str], object]) -> None:
    """Say how many were compiled within `seconds`, and of a few that cannot be launched, why."""
    unfit = {kernel: why for kernel, why in wrong.items() if why is not None}
    show(f"{len(wrong)} kernels in {seconds:.0f} s, {len(unfit)} cannot be launched")
    # Few lines each: most are too large for the shared memory.
    for kernel, why in itertools.islice(unfit.items(), 5):
        show(f"  {kernel}: {why.splitlines()[0][:120]}")


class Graphs:
    """Captured launches, which share memory and are kept: see `captured`."""

    def __init__(self, device: torch.device) -> None:
        """None yet; where nothing can be captured, launches are repeated."""
        self.device = device
        self._kept: list[torch.cuda.CUDAGraph] = []
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        # Read before each replay: cached numbers of the last are gone, and the host is ahead of the device.
        size = BEYOND_CACHES if device.type == "cuda" else 4
        self._other = torch.zeros(max(1, size // 4), device=device)

    def seconds(self, compute: Callable[[], None], repeats: int) -> float:
        """Median seconds of a replay."""
        run = compute
        if self.device.type == "cuda":
            run = captured(compute, self._pool, self._kept).replay
        run()
        watches = []
        for _ in range(repeats):
            self._other.sum()
            watch = Stopwatch(self.device)
            run()
            watch.stop()
            watches.append(watch)
        return statistics.median(watch.seconds() for watch in watches)


def bandwidth_of(device: torch.device) -> float:
    """Bytes per second of a copy, read and written ones counted."""
    size = (1 << 30) if device.type == "cuda" and torch.cuda.is_available() else (1 << 20)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    copied = statistics.median(seconds_of(lambda: target.copy_(source), device)[1] for _ in range(7))
    return 2 * source.numel() / copied
