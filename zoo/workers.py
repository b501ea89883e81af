"""Stages in several processes, none of which outlives the one that began them."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from typing import Any

from torch.multiprocessing.spawn import start_processes


def run(worker: Callable[..., None], args: tuple[object, ...], count: int) -> None:
    """Call ``worker(number, *args)`` in each of ``count`` new processes, and wait until all have ended.

    Torch has them interrupted when this process is killed, which those ignore that a script began in the
    background, or `nohup` did; they would train on, beside the run that is started again.
    """
    start_processes(_worker, args=(worker, *args), nprocs=count, start_method="spawn")


def _worker(number: int, worker: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True, name="parent").start()
    worker(number, *args)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
