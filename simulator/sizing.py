"""How many cells a load needs: the highest rate one cell keeps its objectives at, found in the simulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.objectives import SloSpec
from simulator import workloads
from simulator.hardware import HardwareProfile
from simulator.metrics import ALL, RunResult
from simulator.run import Options, simulate
from simulator.systems import System

# Rates are told apart to this share.
PRECISION = 0.05
# With a request in 16 seconds there is seldom another beside it.
LEAST_RATE = 1.0 / 16.0
# No cell of the profiles serves more requests per second than this.
MOST_RATE = 4096.0
# The chart of a release takes no more pods of one kind (values.schema.json).
MOST_CELLS = 10_000
# A run of fewer requests says little about the one in twenty that may miss.
LEAST_REQUESTS = 100


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked, apart from how often.

    Attributes:
        mix: shares of the built-in classes; None takes AdaServe's.
        slos: objectives by class, `*` for the others; the classes' own where there is none.
        burstiness: gamma shape of the gaps between requests; 1 is Poisson.
        peaks: the classes peak one after the other.
    """

    mix: Mapping[str, float] | None = None
    slos: Mapping[str, SloSpec] = field(default_factory=dict)
    burstiness: float = 1.0
    peaks: bool = False


@dataclass(frozen=True, slots=True)
class Sizing:
    """What a load needs.

    Attributes:
        cell_rate: requests per second at which one cell still attains the target in every class; 0 if it does
            not even with next to no load.
        at_capacity: the run at that rate (or, with `cell_rate` 0, at the lowest tried).
        num_cells: cells for the load, spare ones included.
        num_spare: of these.
        tried: rates tried, with the least attainment of any class.
    """

    cell_rate: float
    at_capacity: RunResult
    num_cells: int
    num_spare: int
    tried: tuple[tuple[float, float], ...]


def least_attainment(result: RunResult) -> float:
    """Attainment of the class that attains least."""
    return min(summary.attainment for kind, summary in result.classes.items() if kind != ALL)


def highest_rate(attains: Callable[[float], bool], least: float, precision: float = PRECISION) -> float:
    """The highest rate that attains, to `precision`, if lower ones do too; 0 if `least` does not.

    Rates are doubled until one does not attain, and the last step then halved on a logarithmic scale.
    """
    if not attains(least):
        return 0.0
    low, high = least, 2.0 * least
    while high < MOST_RATE and attains(high):
        low, high = high, 2.0 * high
    while high / low > 1.0 + precision:
        middle = math.sqrt(low * high)
        if attains(middle):
            low = middle
        else:
            high = middle
    return low


def size(
    profile: HardwareProfile,
    system: System,
    load: Load,
    rate: float,
    *,
    target: float = 0.95,
    headroom: float = 0.2,
    num_spare: int = 0,
    seconds: float = 120.0,
    seeds: Sequence[int] = (0, 1),
    progress: Callable[[float, float], None] | None = None,
) -> Sizing:
    """Cells for `rate` requests per second.

    Args:
        profile: models and hardware of a cell.
        system: policy and batching rule.
        load: what is asked.
        rate: requests per second of all.
        target: attainment that every class must reach.
        headroom: share of a cell's capacity that is kept free, for what routing and arrivals leave uneven.
        num_spare: cells beyond those, so that as many may be lost.
        seconds: of arrivals in each run; longer where that would be few requests.
        seeds: of the runs at each rate; the mean of the least attained class over them counts.
        progress: told of every rate tried, and of its attainment.

    Raises:
        ValueError: for a rate, a time, a burstiness, a target, a headroom or spare cells out of range.
    """
    is_finite = all(0.0 < number < math.inf for number in (rate, seconds, load.burstiness))
    is_share = 0.0 < target <= 1.0 and 0.0 <= headroom < 1.0
    if not (is_finite and is_share and 0 <= num_spare <= MOST_CELLS):
        raise ValueError(
            "rate must be above 0 and finite, and so must seconds and burstiness; target must be in (0, 1], "
            f"headroom in [0, 1), spare cells from 0 to {MOST_CELLS:,}"
        )
    tried: dict[float, float] = {}
    runs: dict[float, RunResult] = {}

    def attains(at: float) -> bool:
        results = [_run(profile, system, load, at, seconds, seed) for seed in seeds]
        tried[at] = sum(map(least_attainment, results)) / len(results)
        runs[at] = min(results, key=least_attainment)
        if progress is not None:
            progress(at, tried[at])
        return tried[at] >= target

    least = LEAST_RATE
    cell_rate = highest_rate(attains, least)
    cells = math.ceil(rate / (cell_rate * (1.0 - headroom))) if cell_rate else 0
    return Sizing(
        cell_rate=cell_rate,
        at_capacity=runs[cell_rate or least],
        num_cells=cells + num_spare if cells else 0,
        num_spare=num_spare if cells else 0,
        tried=tuple(sorted(tried.items())),
    )


def _run(
    profile: HardwareProfile, system: System, load: Load, rate: float, seconds: float, seed: int
) -> RunResult:
    count = max(LEAST_REQUESTS, round(rate * seconds))
    requests = workloads.arrive(
        workloads.synthetic(count, seed, load.mix),
        profile.baseline_s(),
        rate=rate,
        burstiness=load.burstiness,
        peaks=load.peaks,
        own_times=False,
        slos=dict(load.slos),
        seed=seed,
    )
    # Far past saturation a run need not be seen to its end: what is late by then has missed.
    most_s = 3.0 * count / rate + 60.0
    return simulate(profile, system, requests, Options(seed=seed, max_s=most_s))
