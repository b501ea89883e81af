"""The fault search: many schedules from seeds, and the shortest that still fails of each that does."""

from __future__ import annotations

import logging
import multiprocessing
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.chaos_cell import MakeCore
from benchmarks.chaos_schedule import MOST_OPERATIONS, Operation, Schedule, Settings, drawn
from benchmarks.chaos_world import ChaosWorld, summed
from benchmarks.environment import describe
from cluster.core import SchedulerCore

#: Schedules that one task of the pool runs, and most runs that shortening one may take.
_BATCH = 50
_MOST_RUNS = 2000


@dataclass(frozen=True)
class Failure:
    """A schedule that failed.

    Attributes:
        schedule: as short as it could be made.
        kind: of the error, where it was raised, and what it said first; what a shorter one must repeat.
        message: of the error.
        seed: the schedule came from.
    """

    schedule: Schedule
    kind: str
    message: str
    seed: int = -1


def attempt(schedule: Schedule, make: MakeCore = SchedulerCore) -> tuple[Counter[str], Failure | None]:
    """Run a schedule; what happened, and how it failed if it did."""
    with _quiet():
        try:
            return ChaosWorld.run(schedule, make), None
        except Exception as error:  # whatever the core raises is a finding
            frames = traceback.extract_tb(error.__traceback__)
            last = frames[-2] if frames[-1].name == "require" else frames[-1]
            kind = f"{type(error).__name__} in {Path(last.filename).name}, {last.name}"
            return Counter(), Failure(schedule, kind, str(error))


@contextmanager
def _quiet() -> Iterator[None]:
    """What the core logs of the faults is no news here."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def shortened(failure: Failure, make: MakeCore = SchedulerCore) -> Failure:
    """The same failure by fewer operations and plainer settings.

    Delta debugging (Zeller and Hildebrandt, 2002).
    """
    runs = 0
    best = failure

    def fails(schedule: Schedule) -> bool:
        nonlocal runs, best
        if runs >= _MOST_RUNS:
            return False
        runs += 1
        _, found = attempt(schedule, make)
        if found is None or found.kind != failure.kind:
            return False
        best = replace(found, seed=failure.seed)
        return True

    shorter = True
    while shorter:
        before = best.schedule
        _shorten_operations(best.schedule.settings, best.schedule.operations, fails)
        _plain_settings(best.schedule, fails)
        shorter = best.schedule != before and runs < _MOST_RUNS
    return best


def _shorten_operations(
    settings: Settings, operations: tuple[Operation, ...], fails: Callable[[Schedule], bool]
) -> None:
    """Leave out ever smaller parts, as long as it still fails."""
    size = max(1, len(operations) // 2)
    while True:
        start = 0
        while start < len(operations):
            without = operations[:start] + operations[start + size :]
            if fails(Schedule(settings, without)):
                operations = without
            else:
                start += size
        if size == 1:
            return
        size //= 2


def _plain_settings(schedule: Schedule, fails: Callable[[Schedule], bool]) -> None:
    """Every setting that does not matter is the default one."""
    settings, plain = schedule.settings, Settings()
    for name in Settings.__dataclass_fields__:
        tried = replace(settings, **{name: getattr(plain, name)})
        if tried != settings and fails(Schedule(tried, schedule.operations)):
            settings = tried


def search(
    seeds: Sequence[int], make: MakeCore = SchedulerCore, most_operations: int = MOST_OPERATIONS
) -> tuple[Counter[str], list[Failure]]:
    """Run the schedules of these seeds; what happened in all of them, and the failures, not shortened."""
    counts: list[Counter[str]] = []
    failures = []
    for seed in seeds:
        happened, failure = attempt(drawn(seed, most_operations), make)
        counts.append(happened)
        if failure is not None:
            failures.append(replace(failure, seed=seed))
    return summed(counts), failures


def run(num_schedules: int, seed: int, processes: int) -> dict[str, Any]:
    """Search many schedules in several processes; a record with every figure, and scripts of what failed."""
    begun = time.perf_counter()
    seeds = range(seed, seed + num_schedules)
    batches = [seeds[start : start + _BATCH] for start in range(0, num_schedules, _BATCH)]
    counts, failures = Counter[str](), list[Failure]()
    if processes == 1:
        found = map(search, batches)
        for happened, failed in found:
            counts.update(happened)
            failures += failed
    else:
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            for happened, failed in pool.imap_unordered(search, batches):
                counts.update(happened)
                failures += failed
    by_kind: dict[str, list[Failure]] = {}
    for failure in sorted(failures, key=lambda one: one.seed):
        by_kind.setdefault(failure.kind, []).append(failure)
    return {
        "schedules": num_schedules,
        "seed": seed,
        "failed": len(failures),
        "seconds": time.perf_counter() - begun,
        "happened": dict(sorted(counts.items())),
        "failures": [_told(kind, found) for kind, found in by_kind.items()],
        "environment": describe(),
    }


def _told(kind: str, failures: Sequence[Failure]) -> dict[str, Any]:
    shortest = min(failures, key=lambda one: len(one.schedule.operations))
    short = shortened(shortest)
    return {
        "kind": kind,
        "message": short.message,
        "seeds": [failure.seed for failure in failures],
        "operations": len(short.schedule.operations),
        "script": short.schedule.script(),
    }
