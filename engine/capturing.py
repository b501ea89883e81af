"""Capturing what a device computes, so that it is launched at once from then on (CUDA graphs)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def captured(
    compute: Callable[[], None],
    pool: Any,
    kept: list[torch.cuda.CUDAGraph],
    between: Callable[[], None] = lambda: None,
) -> torch.cuda.CUDAGraph:
    """Compute once on another stream than the usual one, as CUDA asks before a capture, then capture on it.

    Args:
        compute: the same operations, on the same memory, at every call; it must not make the host wait.
        pool: of memory for what is computed in between, from `torch.cuda.graph_pool_handle`.
        kept: the graph is put there, also if its capture fails: some versions of torch free what all graphs
            use when one is destroyed (pytorch#193402).
        between: called after the first, before the capture.

    Raises:
        torch.cuda.OutOfMemoryError: if the device has no room for it.
    """
    try:
        return _captured(compute, pool, kept, between)
    except RuntimeError as error:
        # A graph itself, or a kernel's code, is allocated by the driver, whose error is another one.
        if isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" not in str(error):
            raise
        raise torch.cuda.OutOfMemoryError(str(error)) from error


def _captured(
    compute: Callable[[], None], pool: Any, kept: list[torch.cuda.CUDAGraph], between: Callable[[], None]
) -> torch.cuda.CUDAGraph:
    current, stream = torch.cuda.current_stream(), _capture_stream()
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            compute()
    finally:
        current.wait_stream(stream)
    between()
    graph = torch.cuda.CUDAGraph()
    kept.append(graph)
    # By default CUDA would refuse other threads of the process to allocate or to ask for an event meanwhile,
    # and end the capture, too: `generate_batch` of Transformers has one, in `bench engine`.
    capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    # Torch itself goes on on the stream of the capture where its end fails.
    with torch.cuda.stream(current), capture:
        compute()
    return graph


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    """One for all captures of the process: torch keeps a workspace of cuBLAS, 32 MiB on Hopper, for every
    stream that has multiplied, for good and beside what the budget of memory counts."""
    return torch.cuda.Stream()
