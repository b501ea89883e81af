"""Measures the running cell for `flotilla bench fidelity`: with calibration prompts, then with others."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from benchmarks import compare_calibration as calibration
from benchmarks import demo, environment
from benchmarks import prompts as prompt_sources
from benchmarks.compare import CompareOptions, cell_config, traffic_of
from benchmarks.compare_cell import WarmCell
from benchmarks.compare_load import CellLoad, objective_of
from benchmarks.compare_plan import PLAIN, Entrant, Point, Rate, parse_entrant
from benchmarks.compare_workload import Texts, Traffic, requests_for, those_that_fit
from benchmarks.fidelity_record import CALIBRATION, TEST, FidelityRecord, ServedRequest, ServedRun
from benchmarks.fidelity_steps import newest_step, read_steps
from benchmarks.load_client import Outcome
from benchmarks.objectives import Slo
from benchmarks.prompts import Prompt
from cluster.config import FlotillaConfig
from cluster.cost_model import CostProfile
from cluster.model_paths import model_directory
from cluster.profile_file import load_profile
from cluster.stream_messages import Receipt
from engine.model_size import count_parameters

# Steps that are kept; more than a run of half a minute has.
STEPS_KEPT = 100_000
# Seeds of calibration runs are those of the tests plus this.
CALIBRATION_SEED = 1000


@dataclass(frozen=True, slots=True)
class FidelityOptions:
    """What to measure.

    Attributes:
        policies: as for `flotilla bench compare`.
        loads: shares of the saturation throughput without speculation.
        seeds: of the tests.
        duration_s: of arrivals in a test. calibration_s: of those of each calibration run.
        baseline_requests: of each class, for the baseline latency.
        max_tokens: bound on every answer.
        drafters: names of the demo family's drafters to use, all models if empty.
        config: of the cell; the demo family if None.
        folder: where the profile and the log of drafters' choices are written.
    """

    policies: tuple[str, ...]
    loads: tuple[float, ...]
    seeds: tuple[int, ...]
    duration_s: float
    calibration_s: float
    folder: Path
    baseline_requests: int = 4
    max_tokens: int | None = None
    drafters: tuple[str, ...] = ()
    config: Path | None = None


class FidelityCell(WarmCell):
    """A warm cell that keeps its decisions and hands out its receipts."""

    def __init__(self, config: FlotillaConfig, end_tokens: Sequence[int]) -> None:
        super().__init__(config, end_tokens, temperature=0.0, timeout_s=300.0)
        self._requests = _ReceiptLoad(self._client, end_tokens, temperature=0.0, timeout_s=300.0)

    @property
    def num_slots(self) -> int:
        """Tokens the target's KV pool holds."""
        return int(ray.get(self._cell.load.remote())["kv_slots"])

    def decisions(self, limit: int = STEPS_KEPT) -> bytes:
        """The newest steps of the present policy that are kept, as JSON lines."""
        lines: bytes = ray.get(self._cell.decisions.remote(limit)) or b""
        return lines


class _ReceiptLoad(CellLoad):
    """Adds the cell's own receipt to an outcome's metrics."""

    @staticmethod
    def _finish(outcome: Outcome, reason: str, receipt: Receipt | None, now_ms: float) -> None:
        CellLoad._finish(outcome, reason, receipt, now_ms)
        outcome.metrics = (outcome.metrics or {}) | {"receipt": receipt}


def fidelity_config(options: FidelityOptions, profile: Path | None = None) -> FlotillaConfig:
    """The cell: what the simulator does not know is left out of it.

    That is drafters without a model, drafting ahead of the verdict, and shared prompt prefixes.

    Raises:
        ValueError: for a drafter that the configuration does not have.
    """
    raw = cell_config(options.config).model_dump()
    models = [drafter for drafter in raw["drafters"] if drafter["kind"] == "model"]
    unknown = set(options.drafters) - {drafter["name"] for drafter in models}
    if unknown:
        raise ValueError(f"no model drafter is called {', '.join(sorted(unknown))}")
    raw["drafters"] = [one for one in models if not options.drafters or one["name"] in options.drafters]
    raw["scheduler"]["draft_ahead"] = 0
    raw["debug"]["decisions"] = STEPS_KEPT
    raw["profile"] = None if profile is None else str(profile)
    return FlotillaConfig.model_validate(raw)


def halves(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Calibration and test prompts: every other one of each class."""
    seen: dict[str, int] = {}
    parts: tuple[list[Prompt], list[Prompt]] = ([], [])
    for prompt in prompts:
        place = seen.get(prompt.domain, 0)
        seen[prompt.domain] = place + 1
        parts[place % 2].append(prompt)
    return parts


def measure(options: FidelityOptions, report: Callable[[str], None]) -> FidelityRecord:
    """Profile, log of choices, calibration runs and tests, one after the other.

    Args:
        options: what to measure.
        report: told what is done now.
    """
    profile_file = options.folder / "profile.json"
    acceptance_file = options.folder / "acceptance.npz"
    bare = fidelity_config(options)
    entrants = {text: parse_entrant(text, bare) for text in dict.fromkeys((PLAIN, *options.policies))}
    texts = Texts(demo.directory(bare.target.path))
    encoded = [texts.encode(prompt) for prompt in prompt_sources.load("zoo")]
    report("measuring the models' forwards")
    # In a process of its own: what it loads must not stay beside what is measured.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        process.submit(_profile, bare, profile_file).result()
    with ProcessPoolExecutor(1, mp_context=context) as process:
        report("reading along the answers to calibration prompts")
        calibrated_on = halves(encoded)[0]
        process.submit(
            _log, bare, calibrated_on, texts.end_tokens, options.max_tokens, acceptance_file
        ).result()
    config = fidelity_config(options, profile_file)
    told, _ = load_profile(profile_file, config)
    report("starting the cell")
    cell = FidelityCell(config, texts.end_tokens)
    try:
        return _serve(cell, config, options, encoded, entrants, told, acceptance_file, report)
    finally:
        cell.close()


def _serve(
    cell: FidelityCell,
    config: FlotillaConfig,
    options: FidelityOptions,
    encoded: Sequence[Prompt],
    entrants: Mapping[str, Entrant],
    told: CostProfile,
    acceptance_file: Path,
    report: Callable[[str], None],
) -> FidelityRecord:
    max_tokens = int(cell.describe()["max_tokens"])
    parts = halves(those_that_fit(encoded, max_tokens))
    chosen = CompareOptions(policies=options.policies, max_tokens=options.max_tokens)
    traffic = {
        phase: replace(traffic_of(chosen, part), duration_s=seconds)
        for phase, part, seconds in zip(
            (CALIBRATION, TEST), parts, (options.calibration_s, options.duration_s), strict=True
        )
    }
    report("baseline latency and saturation throughput")
    cell.set_policy(entrants[PLAIN])
    sample = calibration.baseline_requests(traffic[CALIBRATION], options.baseline_requests)
    baselines = calibration.measure_baseline(cell, sample, _ignore)
    concurrency = config.scheduler.max_running
    several = calibration.saturation_requests(traffic[CALIBRATION], concurrency)
    saturation = calibration.measure_saturation(cell, several, concurrency, _ignore)
    record = FidelityRecord(
        environment=environment.describe(),
        profile=told,
        num_slots=cell.num_slots,
        max_tokens=max_tokens,
        saturation=saturation,
        acceptance_file=str(acceptance_file),
        num_parameters={
            drafter.name: count_parameters(model_directory(drafter.path))
            for drafter in config.drafters
            if drafter.kind == "model"
        },
    )
    # Before each test a calibration run of the same policy and load: how fast the machine is changes by the
    # minute where others share it.
    plan = [
        (phase, policy, load, first + seed)
        for seed in options.seeds
        for load in options.loads
        for policy in options.policies
        for phase, first in ((CALIBRATION, CALIBRATION_SEED), (TEST, 0))
    ]
    for phase, policy, load, seed in plan:
        report(f"{phase}: {policy} at {load:g} of {saturation:.1f} requests/s, seed {seed}")
        run = _run(cell, entrants[policy], traffic[phase], baselines, saturation, load, seed)
        held = config.model_dump(mode="json")
        held["policy"], held["scheduler"] = entrants[policy].policy, entrants[policy].scheduler
        record.runs.append(
            ServedRun(policy=policy, config=_plain(held), phase=phase, load=load, seed=seed, **run)
        )
    return record


def _run(
    cell: FidelityCell,
    entrant: Entrant,
    traffic: Traffic,
    baselines: Mapping[str, Slo],
    saturation: float,
    load: float,
    seed: int,
) -> dict[str, Any]:
    requests = requests_for(traffic, Point(Rate(load, True)), load * saturation, seed, baselines)
    cell.set_policy(entrant)
    before = newest_step(cell.decisions(1))
    result = cell.load(requests)
    served = []
    for outcome in result.outcomes:
        receipt = (outcome.metrics or {}).get("receipt")
        served.append(
            ServedRequest(
                domain=outcome.request.domain,
                arrival_s=outcome.sent_s,
                max_tokens=outcome.request.max_tokens,
                objective=objective_of(outcome.request),
                receipt=receipt if outcome.is_ok else None,
                client_ms=outcome.e2e_ms,
            )
        )
    return {
        "duration_s": result.duration_s,
        "requests": sorted(served, key=lambda request: request.arrival_s),
        "steps": read_steps(cell.decisions(), after=before),
    }


def _profile(config: FlotillaConfig, path: Path) -> None:
    import torch

    from cluster.profile_measure import measure_profile

    torch.set_num_threads(1)
    measure_profile(config).save(path)


def _log(
    config: FlotillaConfig,
    prompts: Sequence[Prompt],
    end_tokens: Sequence[int],
    max_tokens: int | None,
    path: Path,
) -> None:
    from benchmarks.acceptance_log import record

    record(config, prompts, end_tokens, max_tokens).save(path)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: dict(one) if isinstance(one, Mapping) else one for name, one in values.items()}


def _ignore(outcome: Outcome) -> None:
    """Nothing is shown of single requests."""
