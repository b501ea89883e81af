"""Settings of a process that runs models: threads, and how freed memory is kept."""

from __future__ import annotations

import ctypes
import os
import sys

import torch

# glibc's mallopt parameters, and the largest values that are of use: 32 MiB is its upper bound.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _MAPPED_FROM_BYTES = 512 << 20, 32 << 20


def tune_process() -> None:
    """Set up this process for running models on a CPU; harmless where that does not apply.

    PyTorch gets one thread, or as many as the environment variable FLOTILLA_TORCH_THREADS says: small models
    gain nothing from a second one, and its spinning barriers cost much where cores are shared.

    The C library is told to keep freed memory (up to 512 MiB) instead of returning it. By default every
    intermediate tensor above 128 kB may be a fresh mapping whose pages fault one by one: gathering keys
    and values took up to five times as long.

    Raises:
        ValueError: if FLOTILLA_TORCH_THREADS is not a number.
        RuntimeError: if it is not positive.
    """
    torch.set_num_threads(int(os.environ.get("FLOTILLA_TORCH_THREADS", "1")))
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library, such as musl
        return
    mallopt(_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
