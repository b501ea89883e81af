"""The simulator against the running system (SmartSpec, figure 13): the same requests, both ways."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.acceptance_table import AcceptanceTable
from benchmarks.fidelity_record import (
    CALIBRATION,
    TEST,
    FidelityRecord,
    ServedRequest,
    ServedRun,
    StepSample,
)
from benchmarks.fidelity_steps import newest_step, read_steps
from cluster.config import FlotillaConfig
from cluster.recorded_core import newest_decisions
from simulator.acceptance import DraftQuality, demo_drafters
from simulator.fidelity_fit import ServedProfile, fit_profile, rest_s
from simulator.hardware import HardwareProfile
from simulator.metrics import Outcome, Summary
from simulator.noise import key_of
from simulator.process_pool import process_pool
from simulator.recorded import RecordedAcceptance
from simulator.run import Cell, Options
from simulator.systems import System
from simulator.workloads import SimRequest

# Between runs the cell is idle for so long.
PAUSE_S = 1.0
# What is compared, of requests and of steps.
FIGURES = ("latency_ms", "ttft_ms", "tpot_ms", "attainment", "goodput_tokens_s")
STEP_FIGURES = (
    "drafted_share",
    "requests_per_step",
    "tokens_per_request_step",
    "rows_per_request_step",
    "rate",
    "planned_depth",
    "told_step_ms",
    "step_ms",
    "forward_ms",
    "draft_ms",
    "beside_ms",
)


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One test run, served and simulated.

    Attributes:
        policy, load, seed: of the run.
        served, simulated: figures by name, those of `FIGURES` and `STEP_FIGURES`.
        own_costs: simulated with what forwards took in the test itself. What is wrong here is wrong in the
            simulation; what is wrong besides in `simulated` is that the machine was not as fast as before.
    """

    policy: str
    load: float
    seed: int
    served: dict[str, float]
    simulated: dict[str, float]
    own_costs: dict[str, float]


class _Comparison:
    """A record with what is fitted to it."""

    def __init__(self, record: FidelityRecord) -> None:
        self.record = record
        self.runs = [run for run in record.runs if run.phase == TEST]
        self.fits = {
            name: fit_profile(record, run) for name, run in {_point(run): run for run in self.runs}.items()
        }
        self._acceptance = RecordedAcceptance(AcceptanceTable.load(Path(record.acceptance_file)))

    def simulate(self, number: int, again: int) -> tuple[dict[str, float], dict[str, float]]:
        """Figures of a test run with the costs before it and with its own, simulated once more."""
        run = self.runs[number]
        seed = key_of(run.seed, again) >> 1
        before, own = self.fits[_point(run)], _own_fit(self.record, run)
        return (
            simulate_run(self.record, run, before, self._acceptance, seed),
            simulate_run(self.record, run, own, self._acceptance, seed),
        )


# In a process of a pool.
_comparison: _Comparison | None = None


def _begin(record: FidelityRecord) -> None:
    global _comparison
    _comparison = _Comparison(record)


def _simulate(job: tuple[int, int]) -> tuple[dict[str, float], dict[str, float]]:
    assert _comparison is not None
    return _comparison.simulate(*job)


def compare(record: FidelityRecord, *, simulations: int = 1, processes: int = 1) -> dict[str, Any]:
    """Simulate every test run, and hold what came of it against what was measured.

    The scheduler is given the very configuration and cost profile that it had in the cell. What forwards took
    and what came beside them is fitted to calibration runs of the same policy and load, whose prompts are
    others than the tests': who drafts keeps a second process busy, and all forwards take longer then. Before
    each test the simulated scheduler serves the calibration runs that its policy served before it, from which
    the real one has learnt too.

    Args:
        record: of `flotilla bench fidelity`.
        simulations: of every test, with other noise and other answers of those recorded; means are compared.
        processes: at once.
    """
    whole = _Comparison(record)
    runs, fits = whole.runs, whole.fits
    jobs = [(number, again) for number in range(len(runs)) for again in range(simulations)]
    if processes > 1:
        context = multiprocessing.get_context("spawn")
        with process_pool(processes, mp_context=context, initializer=_begin, initargs=(record,)) as pool:
            results = list(pool.map(_simulate, jobs))
    else:
        results = [whole.simulate(*job) for job in jobs]
    compared = []
    for number, run in enumerate(runs):
        before, own = zip(*results[number * simulations : (number + 1) * simulations], strict=True)
        compared.append(
            Compared(
                policy=run.policy,
                load=run.load,
                seed=run.seed,
                served=served_figures(run),
                simulated=_mean(before),
                own_costs=_mean(own),
            )
        )
    return {
        "fitted": {
            name: {
                "factors": fitted.factors,
                "fixed_s": fitted.fixed_s,
                "bend": fitted.bend,
                "trips": msgspec.to_builtins(fitted.profile.trips),
                "jitter": fitted.jitter,
                "num_steps": fitted.num_steps,
                "step length error": fitted.error,
            }
            for name, fitted in fits.items()
        },
        "num_unanswered": sum(one.receipt is None for run in runs for one in run.requests),
        "runs": msgspec.to_builtins(compared),
        "points": points(compared),
    }


def written_profile(
    record: FidelityRecord, name: str, qualities: Mapping[str, DraftQuality] | None = None
) -> HardwareProfile:
    """The cell as it served, for `flotilla simulate --profile`.

    Args:
        record: of `flotilla bench fidelity`.
        name: of the profile.
        qualities: how good drafters are; None for the demo family's, as fitted.

    Raises:
        ValueError: for a drafter whose quality is not known.
    """
    fitted, qualities = fit_profile(record), demo_drafters() if qualities is None else qualities
    unknown = fitted.profile.drafters.keys() - qualities.keys()
    if unknown:
        raise ValueError(
            f"how good {', '.join(sorted(unknown))} drafts is not known, only {', '.join(qualities)}"
        )
    drafters = {
        drafter: msgspec.structs.replace(held, quality=qualities[drafter])
        for drafter, held in fitted.profile.drafters.items()
    }
    machine = record.environment
    return msgspec.structs.replace(
        fitted.profile,
        name=name,
        target="demo target",
        hardware=f"{machine['cpus']} cores, {machine['processor']}",
        source="measured by flotilla bench fidelity on the running demo family",
        error=f"steps {100 * fitted.error:+.1f} % on average over {fitted.num_steps}",
        drafters=drafters,
        acceptance="demo",
    )


def simulate_run(
    record: FidelityRecord, run: ServedRun, fitted: ServedProfile, acceptance: RecordedAcceptance, seed: int
) -> dict[str, float]:
    """Figures of a run's requests on the simulated cell, after its policy's calibration runs."""
    config = FlotillaConfig.model_validate(run.config)
    options = Options(
        seed=seed, jitter=fitted.jitter, acceptance=acceptance, believed=record.profile, max_width=4
    )
    cell = Cell(fitted.profile, System(run.policy, config), options)
    start = 1.0
    before = record.runs[: record.runs.index(run)]
    earlier = [one for one in before if one.phase == CALIBRATION and one.policy == run.policy]
    for number, one in enumerate(earlier):
        for request in requests_of(one, f"calibration-{number}", start, seed):
            cell.submit(request)
        start += one.duration_s + PAUSE_S
    cell.run()
    before_test = _newest_step(cell)
    begun_s = cell.clock.now + PAUSE_S
    asked = requests_of(run, "test", begun_s, seed)
    for request in asked:
        cell.submit(request)
    cell.run()
    outcomes = [Outcome.of(request, cell.receipts.get(request.request_id)) for request in asked]
    ended = max((outcome.ended_s or 0.0 for outcome in outcomes), default=0.0)
    figures = figures_of(outcomes, max(1e-9, ended - begun_s))
    return figures | step_figures(_steps_after(cell, before_test))


def requests_of(run: ServedRun, name: str, start_s: float, seed: int) -> list[SimRequest]:
    """The requests that the cell answered, with the lengths of its answers."""
    made = []
    for number, request in enumerate(run.requests):
        if request.receipt is None:
            continue
        made.append(
            SimRequest(
                request_id=f"{name}-{number}",
                kind=request.domain,
                arrival_s=start_s + request.arrival_s,
                num_prompt=request.receipt.num_prompt_tokens,
                num_output=max(1, request.receipt.num_output_tokens),
                max_tokens=request.max_tokens,
                objective=request.objective,
                seed=key_of(seed, number, *name.encode()) >> 1,
            )
        )
    return made


def served_figures(run: ServedRun) -> dict[str, float]:
    """The same figures of the run as it was."""
    answered = [request for request in run.requests if request.receipt is not None]
    outcomes = [_outcome(request) for request in answered]
    return figures_of(outcomes, run.duration_s) | step_figures(run.steps)


def step_figures(steps: Sequence[StepSample]) -> dict[str, float]:
    """Means over iterations, and where their time went."""
    num, verified = max(1, len(steps)), sum(step.num_requests for step in steps)
    rates = [rate for step in steps for rate in step.rates]
    depths = [depth for step in steps for depth in step.depths]
    drafting = [max((draft.seconds for draft in step.drafts), default=0.0) for step in steps]
    return {
        "drafted_share": sum(bool(step.drafts) for step in steps) / num,
        "requests_per_step": verified / num,
        "tokens_per_request_step": sum(step.num_committed for step in steps) / max(1, verified),
        "rows_per_request_step": sum(step.num_tokens for step in steps) / max(1, verified),
        "rate": sum(rates) / max(1, len(rates)),
        "planned_depth": sum(depths) / max(1, len(depths)),
        "told_step_ms": 1e3 * sum(step.told.get("step_s", 0.0) for step in steps) / num,
        "step_ms": 1e3 * sum(step.whole_s for step in steps) / num,
        "forward_ms": 1e3 * sum(step.forward_s for step in steps) / num,
        "draft_ms": 1e3 * sum(drafting) / num,
        "beside_ms": 1e3 * sum(rest_s(step) for step in steps) / num,
    }


def figures_of(outcomes: Sequence[Outcome], seconds: float) -> dict[str, float]:
    """Means over requests; latencies by the scheduler's clock."""
    summary = Summary.of(outcomes, seconds)
    return {
        "latency_ms": summary.e2e_ms.mean or 0.0,
        "ttft_ms": summary.ttft_ms.mean or 0.0,
        "tpot_ms": summary.tpot_ms.mean or 0.0,
        "attainment": summary.attainment,
        "goodput_tokens_s": summary.goodput_tokens_s,
    }


def points(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """By policy and load, means over seeds and the simulator's relative error, positive if it is above."""
    found = []
    for policy, load in dict.fromkeys((one.policy, one.load) for one in compared):
        held = [one for one in compared if (one.policy, one.load) == (policy, load)]
        figures = {}
        for name in (*FIGURES, *STEP_FIGURES):
            was = float(np.mean([one.served[name] for one in held]))
            said = float(np.mean([one.simulated[name] for one in held]))
            own = float(np.mean([one.own_costs[name] for one in held]))
            figures[name] = {
                "served": was,
                "simulated": said,
                "error": said / was - 1.0 if was else None,
                "own costs": own,
                "error with own costs": own / was - 1.0 if was else None,
                "by seed": [[one.served[name], one.simulated[name], one.own_costs[name]] for one in held],
            }
        found.append({"policy": policy, "load": load, "seeds": len(held), "figures": figures})
    return found


def _mean(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([one[name] for one in figures])) for name in figures[0]}


def _own_fit(record: FidelityRecord, run: ServedRun) -> ServedProfile:
    """The machine as it was during the run."""
    itself = msgspec.structs.replace(run, phase=CALIBRATION)
    return fit_profile(msgspec.structs.replace(record, runs=[itself]))


def _point(run: ServedRun) -> str:
    return f"{run.policy} at {run.load:g}x"


def _outcome(request: ServedRequest) -> Outcome:
    """As `Outcome.of`, of a request that was served."""
    receipt = request.receipt
    if receipt is None:
        return Outcome(kind=request.domain, attained=False)
    asked = SimRequest(
        "", request.domain, 0.0, receipt.num_prompt_tokens, receipt.num_output_tokens, request.objective, 0
    )
    return Outcome.of(asked, (request.arrival_s + receipt.e2e_ms / 1e3, receipt))


def _newest_step(cell: Cell) -> int:
    return newest_step(newest_decisions(cell.core, 1) or b"")


def _steps_after(cell: Cell, step: int) -> list[StepSample]:
    """Those of the test alone are written out and read: the calibration runs before it are many more."""
    return read_steps(newest_decisions(cell.core, max(0, _newest_step(cell) - step)) or b"", after=step)
