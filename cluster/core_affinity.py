"""Processor cores that a target claims on its machine, so that nobody of its cell takes them from it."""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import IO

_log = logging.getLogger(__name__)


def usable_cores() -> frozenset[int]:
    """Cores that this thread may run on; none where that cannot be told or chosen."""
    return frozenset(os.sched_getaffinity(0)) if sys.platform == "linux" else frozenset()


def is_crowded(num_cores: int, num_ranks: int, num_drafters: int) -> bool:
    """Whether processes of one cell get into each other's way unless they keep to cores.

    So it is while they are more than the cores (the scheduler is one of them), and the target's ranks leave
    some over. With a core for everybody the operating system does well by itself.
    """
    return num_ranks < num_cores < num_ranks + 1 + num_drafters


def keep_to(cores: Collection[int], thread: int = 0) -> None:
    """Let a thread, this one if 0, run on these cores and no others; on any it may use if none are named."""
    if sys.platform == "linux" and cores:
        try:
            os.sched_setaffinity(thread, cores)
        except OSError as error:  # taken from this container meanwhile, or the thread has ended
            _log.warning("a thread could not be kept to the cores %s: %s", sorted(cores), error)


class CoreClaim:
    """One core, claimed against other claimants of this machine until it is released or the process ends."""

    def __init__(self, core: int, file: IO[bytes]) -> None:
        """Hold `file`, which is locked."""
        self.core = core
        self._file = file

    def release(self) -> None:
        """Let others have it."""
        self._file.close()


def claim_core(cores: Collection[int], directory: Path | None = None) -> CoreClaim | None:
    """Claim the first of `cores` that nobody has; None if all are claimed, or it cannot be told.

    Args:
        cores: to choose from.
        directory: of the files that stand for cores; by default one of the user's in the system's directory
            for temporary files.
    """
    folder = directory or Path(tempfile.gettempdir()) / f"flotilla-cores-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} is another user's")
        for core in sorted(cores):
            file = (folder / str(core)).open("ab")
            try:
                # Released by the system when the process ends, however it does.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
            else:
                return CoreClaim(core, file)
    except OSError as error:
        _log.warning("no core is claimed for the target: %s", error)
    return None
