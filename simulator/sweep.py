"""Several runs, one after the other or in parallel processes; results come in the order asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass

from simulator.hardware import HardwareProfile
from simulator.metrics import RunResult
from simulator.process_pool import process_pool
from simulator.run import Options, simulate
from simulator.systems import System
from simulator.workloads import SimRequest


@dataclass(frozen=True, slots=True)
class Job:
    """One run; arguments as of `simulator.run.simulate`.

    Attributes:
        label: for whoever reads the results, such as the rate.
    """

    label: str
    profile: HardwareProfile
    system: System
    requests: Sequence[SimRequest]
    options: Options
    background: Sequence[SimRequest] = ()


def run_job(job: Job) -> RunResult:
    """Run it here."""
    return simulate(job.profile, job.system, job.requests, job.options, background=job.background)


def run_jobs(
    jobs: Iterable[Job], processes: int = 1, done: Callable[[Job], None] | None = None
) -> list[RunResult]:
    """Run all.

    Args:
        jobs: what to run.
        processes: at once.
        done: told of every run that ends.
    """
    listed = list(jobs)
    if processes <= 1:
        results = []
        for job in listed:
            results.append(run_job(job))
            if done is not None:
                done(job)
        return results
    with process_pool(processes) as pool:
        futures = {pool.submit(run_job, job): job for job in listed}
        for future in as_completed(futures):
            future.result()
            if done is not None:
                done(futures[future])
        return [future.result() for future in futures]
