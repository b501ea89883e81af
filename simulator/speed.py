"""How much faster than real time a simulation is, and which part of it takes the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from simulator import hardware, systems, workloads
from simulator.hardware import HardwareProfile
from simulator.run import Cell, Options
from simulator.sweep import Job, run_jobs
from simulator.workloads import SimRequest

# What is asked for (issue 7), for a cell of a 70B model at 4 requests/s.
WANTED = 1000.0
PARTS = ("scheduler", "drafters", "target", "rest")

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class _Watch:
    """Processor seconds of the calls of some functions, by part."""

    seconds: dict[str, float] = field(default_factory=dict)

    def around(self, part: str, function: Callable[P, T]) -> Callable[P, T]:
        """The function, timed."""
        self.seconds.setdefault(part, 0.0)

        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            begun = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - begun

        return timed


def measure(
    names: Sequence[str], *, profile: str, rate: float, seconds: float, rounds: int, processes: int
) -> dict[str, Any]:
    """Run every system `rounds` times in turns; the fastest of each counts.

    Shares of parts are taken in a run of their own, whose timers cost something too, and applied to the
    fastest run without them.

    Args:
        names: of systems.
        profile: of hardware.
        rate: requests per second.
        seconds: of arrivals.
        rounds: repetitions.
        processes: for the last measurement, of so many seeds at once.

    Raises:
        ValueError: for an unknown system or profile.
    """
    machine = hardware.load(profile)
    requests = requests_for(machine, rate, seconds, seed=0)
    built = {name: systems.parse(name) for name in names}
    fastest: dict[str, tuple[float, float, int]] = {}
    for _ in range(rounds):
        for name, system in built.items():
            cell = _loaded(Cell(machine, system, Options()), requests)
            begun = time.process_time()
            cell.run()
            took = time.process_time() - begun
            entry = (took, cell.clock.now, cell.core.totals.iterations)
            fastest[name] = min(fastest.get(name, entry), entry)
    results = {}
    for name, system in built.items():
        took, simulated_s, iterations = fastest[name]
        cell = _loaded(Cell(machine, system, Options()), requests)
        shares = _shares(cell)
        each = 1e6 * took / max(1, iterations)
        results[name] = {
            "simulated seconds": simulated_s,
            "processor seconds": took,
            "times real time": simulated_s / took,
            "iterations per simulated second": iterations / simulated_s,
            "microseconds per iteration": each,
            "microseconds": {part: each * shares[part] for part in PARTS},
            "shares": shares,
            # At the speed wanted, an iteration may take so long.
            "microseconds allowed": 1e6 * simulated_s / max(1, iterations) / WANTED,
            "times real time without the scheduler": simulated_s / (took * (1.0 - shares["scheduler"])),
            "times real time with the scheduler alone": simulated_s / (took * shares["scheduler"]),
        }
    return {
        "profile": profile,
        "rate": rate,
        "parts": list(PARTS),
        "systems": results,
        "together": _together(names[-1], machine, rate, seconds, processes),
    }


def requests_for(machine: HardwareProfile, rate: float, seconds: float, seed: int) -> list[SimRequest]:
    """The built-in mix at Poisson arrivals."""
    shapes = workloads.synthetic(max(1, round(rate * seconds)), seed)
    return workloads.arrive(shapes, machine.baseline_s(), rate=rate, seed=seed)


def _loaded(cell: Cell, requests: Sequence[SimRequest]) -> Cell:
    for request in requests:
        cell.submit(request)
    return cell


def _shares(cell: Cell) -> dict[str, float]:
    """Of a run's time, what each part took."""
    watch = _Watch()
    core, target = cell.core, cell.target
    for thing, name, part in (
        (core, "handle", "scheduler"),
        (core, "reflect", "scheduler"),
        (target, "step", "target"),
        *((drafter, "draft", "drafters") for drafter in cell.drafters.values()),
    ):
        setattr(thing, name, watch.around(part, getattr(thing, name)))
    begun = time.perf_counter()
    cell.run()
    whole = time.perf_counter() - begun
    shares = {part: watch.seconds.get(part, 0.0) / whole for part in PARTS if part != "rest"}
    return {**shares, "rest": 1.0 - sum(shares.values())}


def _together(
    name: str, machine: HardwareProfile, rate: float, seconds: float, processes: int
) -> dict[str, Any]:
    """Twice as many seeds as processes, in parallel; wall time, the start of the processes included."""
    system = systems.parse(name)
    seeds = range(2 * processes)
    jobs = [
        Job(str(seed), machine, system, requests_for(machine, rate, seconds, seed), Options(seed=seed))
        for seed in seeds
    ]
    begun = time.perf_counter()
    simulated_s = sum(result.simulated_s for result in run_jobs(jobs, processes))
    took = time.perf_counter() - begun
    return {
        "system": name,
        "runs": len(jobs),
        "processes": processes,
        "wall seconds": took,
        "times real time": simulated_s / took,
    }
