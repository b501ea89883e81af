"""Processor cores that a target claims on its machine, so that nobody of its cell takes them from it."""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import IO

_log = logging.getLogger(__name__)

# A thread that ran for less than this share of the time that it could have is let go for a while. Four
# drafters that share a core have more; one at Ray's own low priority (`cluster.priority`) has 3 % of a core
# that another program keeps busy.
LEAST_SHARE = 0.2
LET_GO_S = 30.0
# If it also waited for more than this share of the time: idle threads run little, and so wait little.
MOST_WAITING = 0.4
# Judged once in so long.
LOOK_S = 0.5


def usable_cores(thread: int = 0) -> frozenset[int]:
    """Cores that a thread, this one if 0, may run on; none where that cannot be told or chosen."""
    return frozenset(os.sched_getaffinity(thread)) if sys.platform == "linux" else frozenset()


def is_crowded(num_cores: int, num_ranks: int, num_drafters: int) -> bool:
    """Whether processes of one cell get into each other's way unless they keep to cores.

    So it is while they are more than the cores (the scheduler is one of them), and the target's ranks leave
    some over. With a core for everybody the operating system does well by itself.
    """
    return num_ranks < num_cores < num_ranks + 1 + num_drafters


def keep_to(cores: Collection[int], thread: int = 0) -> None:
    """Let a thread, this one if 0, run on these cores and no others; nothing changes if none are named."""
    if sys.platform == "linux" and cores:
        try:
            os.sched_setaffinity(thread, cores)
        except OSError as error:  # taken from this container meanwhile, or the thread has ended
            _log.warning("a thread could not be kept to the cores %s: %s", sorted(cores), error)


class KeptThread:
    """A thread of this process that keeps to cores while it gets enough of them.

    Several programs may keep a core busy, or one at a higher priority: Ray's own for workers is low. A thread
    that may go nowhere else would starve there.
    """

    def __init__(self, thread: int, cores: Collection[int], usable: Collection[int]) -> None:
        """Keep it to `cores` of the `usable` ones; `thread` is its native id."""
        self._thread = thread
        self._cores, self._usable = frozenset(cores), frozenset(usable)
        self._seen = scheduled(thread)
        self._since = time.monotonic()
        self._again_at: float | None = None
        self._is_free = False
        # Seconds that it ran, waited, and was kept, up to when it was freed last.
        self._before = (0.0, 0.0, 0.0)
        keep_to(self._cores if self._seen is not None else self._usable, thread)

    @property
    def is_kept(self) -> bool:
        """Whether it keeps to them now."""
        return self._seen is not None and self._again_at is None and not self._is_free

    def free(self, is_free: bool) -> None:
        """Let it go where it likes, until it is called back: for moments, now and then."""
        if is_free == self._is_free or self._cores == self._usable:
            return
        if self._seen is None or self._again_at is not None:
            self._is_free = is_free
            return
        now, times = time.monotonic(), scheduled(self._thread)
        if is_free:
            if times is not None:
                self._before = self._so_far(times, now)
        elif times is None:  # nobody could tell that it starves
            return
        else:
            self._seen, self._since = times, now
        self._is_free = is_free
        keep_to(self._usable if is_free else self._cores, self._thread)

    def look(self, now: float) -> None:
        """Let it go where it hardly ran though it could; try again later. To be called every second or so."""
        if self._again_at is not None:
            if now >= self._again_at:
                self._again_at = None
                self._begin(scheduled(self._thread), now)
                if not self._is_free:
                    keep_to(self._cores, self._thread)
            return
        times = scheduled(self._thread)
        if times is None or self._seen is None:
            return
        ran, waited, elapsed = self._before if self._is_free else self._so_far(times, now)
        if elapsed < LOOK_S:
            return
        self._begin(times, now)
        if waited > MOST_WAITING * elapsed and ran < LEAST_SHARE * (ran + waited):
            _log.info(
                "a thread kept to cores %s ran for %.3f s and waited for %.3f s: it is let go for %.0f s",
                sorted(self._cores),
                ran,
                waited,
                LET_GO_S,
            )
            self._again_at = now + LET_GO_S
            keep_to(self._usable, self._thread)

    def _begin(self, times: tuple[float, float] | None, now: float) -> None:
        self._seen, self._since, self._before = times, now, (0.0, 0.0, 0.0)

    def _so_far(self, times: tuple[float, float], now: float) -> tuple[float, float, float]:
        """Seconds that it ran, waited, and was kept since it was judged last; it is kept now."""
        assert self._seen is not None
        ran, waited, elapsed = self._before
        return ran + times[0] - self._seen[0], waited + times[1] - self._seen[1], elapsed + now - self._since


def scheduled(thread: int) -> tuple[float, float] | None:
    """Seconds that a thread of this process has run, and waited for a core; None where nobody says."""
    try:
        ran, waited, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    return int(ran) / 1e9, int(waited) / 1e9


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
    """Claim the first of `cores` that nobody has; None if it cannot be told, or would leave none to drafters.

    Args:
        cores: to choose from. The last is not given away: somebody's drafters need one.
        directory: of the files that stand for cores; by default one of the user's in the system's directory
            for temporary files.
    """
    folder = directory or Path(tempfile.gettempdir()) / f"flotilla-cores-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} is another user's")
        for core in sorted(cores)[:-1]:
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
