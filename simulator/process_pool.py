"""Processes that share the runs of a simulation."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any


@contextmanager
def process_pool(processes: int, **options: Any) -> Iterator[ProcessPoolExecutor]:
    """As `ProcessPoolExecutor`, but left by an exception, such as that of Ctrl-C, it ends at once.

    A pool alone would first run all that was submitted: its processes take an interrupt for the outcome of
    one run, and begin the next.

    Args:
        processes: at most.
        options: as of `ProcessPoolExecutor`.
    """
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(processes, **options) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise
