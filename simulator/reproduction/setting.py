"""One point of a figure: everything that determines a simulated run, but for its seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.objectives import Limit, SloSpec
from cluster.config import SelectorConfig
from simulator import hardware, oracle, systems, workloads
from simulator.acceptance import DraftQuality, load_fitted
from simulator.hardware import HardwareProfile
from simulator.metrics import RunResult
from simulator.run import Options, simulate
from simulator.systems import System
from simulator.workloads import Shape, SimRequest

# The file whose arrivals and lengths are stretched to rates that have none of their own.
TRACE, TRACE_RATE = "workloads/adaserve/fig8_9_emission_rps{rate}_ol256.json.gz", 4.8
_TRACE_RATES = (2.6, 2.8, 3.0, 3.4, 3.6, 4.0, 4.2, 4.4, 4.8)
# Gamma shape of the gaps in those files: their coefficient of variation is 1.17 to 1.26.
TRACE_BURSTINESS = 0.7
# A run is given up so many seconds after its last arrival.
_PATIENCE_S = 300.0


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What one system is run on.

    Attributes:
        profile: of models and hardware.
        system: as `simulator.systems.parse` reads it, or a policy of `simulator.oracle`.
        rate: requests per second.
        seconds: of arrivals.
        count: if not 0, so many requests that all come at once, instead of arrivals.
        traced: arrivals and lengths from AdaServe's files where there are any.
        shares: of the built-in classes; the mix's own if empty.
        objectives: TPOT in ms by class; "1.2x" is relative to the baseline, "none" is no objective. Those of
            the built-in classes if empty.
        ttft_ms: objective of all.
        peaks: classes peak one after the other.
        burstiness: gamma shape of the gaps.
        num_prompt, num_output: tokens of every request, if not 0.
        lengths: medians of prompt and answer tokens by class, in place of the built-in classes' own.
        max_tokens: bound on every answer, of which the scheduler is told in place of its length; 0 for none.
        acceptance: fixed rate of every drafter at every position, if not 0.
        own_spread: how much, in logits, requests suit one drafter and not another; as fitted if negative.
        max_running, max_depth, micro_batches: as of the scheduler and policy.
        selector: who chooses drafters; drafters: those that are there, all if empty.
        draft_slowdown: factor on the fixed part of a drafter's forward.
    """

    profile: str = "llama-70b-a100"
    system: str = "flotilla"
    rate: float = 4.0
    seconds: float = 360.0
    count: int = 0
    traced: bool = False
    shares: dict[str, float] = {}
    objectives: dict[str, str] = {}
    ttft_ms: float = 0.0
    peaks: bool = False
    burstiness: float = 1.0
    num_prompt: int = 0
    num_output: int = 0
    lengths: dict[str, tuple[int, int]] = {}
    max_tokens: int = 0
    acceptance: float = 0.0
    own_spread: float = -1.0
    max_running: int = 256
    max_depth: int = 8
    micro_batches: int | str = 1
    selector: str = "flotilla"
    drafters: tuple[str, ...] = ()
    draft_slowdown: float = 1.0


def system_of(setting: Setting, seed: int = 0) -> System:
    """Its scheduler; `seed` is of what its selector draws.

    Raises:
        ValueError: if there is no system of that name.
    """
    bounds = systems.Bounds(max_running=setting.max_running, max_depth=setting.max_depth)
    parsed = oracle.parse(setting.system, bounds)
    config = parsed.config
    scheduler = config.scheduler.model_copy(update={"micro_batches": setting.micro_batches})
    selector = SelectorConfig(name=setting.selector, seed=seed)
    config = config.model_copy(update={"scheduler": scheduler, "selector": selector})
    return replace(parsed, config=config)


def profile_of(setting: Setting) -> HardwareProfile:
    """The models and hardware, as changed by the setting.

    Raises:
        ValueError: for an unknown profile or drafter.
    """
    held = hardware.load(setting.profile)
    unknown = set(setting.drafters) - held.drafters.keys()
    if unknown:
        raise ValueError(f"{setting.profile} has no drafter {', '.join(sorted(unknown))}")
    drafters = {}
    for place, (name, drafter) in enumerate(held.drafters.items()):
        if setting.drafters and name not in setting.drafters:
            continue
        # By itself it says of a request what it says of it beside the others.
        drafter = msgspec.structs.replace(drafter, stream=place)
        if setting.acceptance:
            quality = DraftQuality(rate={"*": setting.acceptance}, fixed=True)
            drafter = msgspec.structs.replace(drafter, quality=quality)
        if setting.draft_slowdown != 1.0:
            cost = drafter.cost
            cost = msgspec.structs.replace(cost, delta=cost.delta * setting.draft_slowdown)
            drafter = msgspec.structs.replace(drafter, cost=cost)
        drafters[name] = drafter
    return msgspec.structs.replace(held, drafters=drafters)


def requests_of(
    setting: Setting, profile: HardwareProfile, seed: int, data: Path | None = None
) -> list[SimRequest]:
    """The requests of a run.

    Args:
        setting: what they are like.
        profile: whose baseline relative objectives refer to.
        seed: of everything drawn.
        data: folder of recorded data; None makes all requests from built-in statistics.
    """
    own_times = True
    if setting.count:
        drawn = workloads.synthetic(setting.count, seed, setting.shares or None)
        shapes = [replace(shape, arrival_s=0.0) for shape in drawn]
    elif setting.traced and data is not None:
        shapes = _traced(setting, seed, data)
    elif setting.lengths:
        count, own_times = max(1, round(setting.rate * setting.seconds)), False
        shapes = workloads.of_lengths(count, seed, setting.lengths, setting.shares or None)
    else:
        output = 256 if setting.traced else None
        count = max(1, round(setting.rate * setting.seconds))
        shapes, own_times = workloads.synthetic(count, seed, setting.shares or None, output), False
    if setting.num_prompt or setting.num_output:
        shapes = [
            replace(
                shape,
                num_prompt=setting.num_prompt or shape.num_prompt,
                num_output=setting.num_output or shape.num_output,
            )
            for shape in shapes
        ]
    burstiness = TRACE_BURSTINESS if setting.traced else setting.burstiness
    if setting.max_tokens:
        shapes = [replace(shape, num_output=min(shape.num_output, setting.max_tokens)) for shape in shapes]
    requests = workloads.arrive(
        shapes,
        profile.baseline_s(),
        rate=None if own_times else setting.rate,
        burstiness=burstiness,
        peaks=setting.peaks,
        own_times=own_times,
        slos=_slos(setting),
        seed=seed,
    )
    if not setting.max_tokens:
        return requests
    return [replace(request, max_tokens=setting.max_tokens) for request in requests]


def run(setting: Setting, seed: int, data: Path | None = None) -> RunResult:
    """Simulate it."""
    profile = profile_of(setting)
    acceptance = load_fitted()[profile.acceptance]
    if setting.own_spread >= 0.0:
        acceptance = msgspec.structs.replace(acceptance, own_spread=setting.own_spread)
    requests = requests_of(setting, profile, seed, data)
    last = max(request.arrival_s for request in requests)
    options = Options(seed=seed, acceptance=acceptance, max_s=last + _PATIENCE_S)
    return simulate(profile, system_of(setting, seed), requests, options)


def figures_of(result: RunResult) -> dict[str, float]:
    """The numbers that figures show: shares in per cent, tokens per second, milliseconds."""
    held = result.all
    figures: dict[str, float | None] = {
        "attainment": 100.0 * held.attainment,
        "violations": 100.0 * (1.0 - held.attainment),
        "goodput": held.goodput_tokens_s,
        "throughput": held.throughput_tokens_s,
        "accepted tokens": held.accepted_tokens_s,
        "step goodput": result.steps.goodput_tokens_s,
        "tokens per step": held.accepted_per_step,
        "TTFT": held.ttft_ms.mean,
        "latency": held.e2e_ms.mean,
        "requests": float(held.num_requests),
        "unfinished": float(result.num_unfinished),
    }
    return {name: float(value) for name, value in figures.items() if value is not None}


def recorded_file(setting: Setting, data: Path) -> Path:
    """Which of AdaServe's files a traced setting takes; a rate without one takes that for 4.8."""
    return data / TRACE.format(rate=f"{_recorded_rate(setting):.1f}")


def _recorded_rate(setting: Setting) -> float:
    return setting.rate if setting.rate in _TRACE_RATES else TRACE_RATE


def _traced(setting: Setting, seed: int, data: Path) -> list[Shape]:
    """A window of one of AdaServe's files, another for each seed, at the mean rate of the whole file.

    A rate without a file takes another's, compressed or stretched.
    """
    own, shapes = _recorded_rate(setting), workloads.adaserve_file(recorded_file(setting, data))
    times = np.array([shape.arrival_s or 0.0 for shape in shapes]) * (own / setting.rate)
    whole, mean = times.max() + 1e-9, (len(shapes) - 1) / times.max()
    if whole > setting.seconds:
        start = float(np.random.default_rng((seed, 4)).random()) * (whole - setting.seconds)
        inside = np.flatnonzero((times >= start) & (times < start + setting.seconds))
        shapes, times = [shapes[i] for i in inside], times[inside] - times[inside[0]]
        times *= (len(shapes) - 1) / mean / times[-1]
    return [replace(shape, arrival_s=time) for shape, time in zip(shapes, times.tolist(), strict=True)]


def _slos(setting: Setting) -> Mapping[str, SloSpec]:
    ttft = Limit(setting.ttft_ms) if setting.ttft_ms else None
    specs: dict[str, SloSpec] = {}
    if ttft is not None and "*" not in setting.objectives:
        specs = {kind: replace(held.slo, ttft=ttft) for kind, held in workloads.MIX.items()}
        specs["*"] = SloSpec(ttft=ttft)
    for kind, text in setting.objectives.items():
        if text == "none":
            specs[kind] = SloSpec(ttft=ttft)
            continue
        relative = text.endswith("x")
        specs[kind] = SloSpec(tpot=Limit(float(text.removesuffix("x")), relative=relative), ttft=ttft)
    return specs
