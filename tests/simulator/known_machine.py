"""A machine of known costs, and what a system serves on it, as `flotilla bench fidelity` records it."""

from __future__ import annotations

import numpy as np

from benchmarks.acceptance_table import AcceptanceTable
from benchmarks.fidelity_record import CALIBRATION, FidelityRecord, ServedRequest, ServedRun, StepSample
from benchmarks.fidelity_steps import read_steps
from cluster.config import DebugConfig
from cluster.cost_model import CostProfile
from cluster.linear_cost import LinearCost
from cluster.recorded_core import newest_decisions
from cluster.stream_messages import Objective
from simulator.acceptance import AcceptanceModel, DraftQuality, choices
from simulator.hardware import DrafterProfile, HardwareProfile, Trips
from simulator.noise import key_of
from simulator.recorded import RecordedAcceptance
from simulator.run import Cell, Options
from simulator.systems import System, parse
from simulator.workloads import SimRequest

# Costs as on a CPU, as a profile has them; the machine is slower by these factors and takes time besides.
TOLD = CostProfile(
    target=LinearCost(alpha=1e-6, beta=1.4e-7, gamma=9e-5, delta=2.5e-3, gamma_knee=3e-5, knee_tokens=4.0),
    drafters={"small": LinearCost(gamma=2.5e-5, rho=1.3e-5, delta=3.5e-4)},
    overhead_s=1e-3,
)
FACTOR, AFTER_DRAFTING, DRAFTER_FACTOR, CALL_S = 1.1, 1.2, 1.3, 6e-4
TRIPS = Trips(verify_s=8e-4, verify_request_s=1e-4, draft_s=1.2e-3, draft_request_s=1.5e-4)
QUALITY = DraftQuality(rate={"chat": 0.75}, offset=-1.0)
SATURATION = 12.0


def machine(*, target: float = FACTOR, trips: Trips = TRIPS) -> HardwareProfile:
    """What the running system is simulated on."""
    drafter = DrafterProfile(
        model="small",
        cost=TOLD.drafters["small"].scaled(DRAFTER_FACTOR),
        quality=QUALITY,
        call_s=CALL_S,
    )
    return HardwareProfile(
        name="known",
        target="target",
        hardware="simulated",
        source="made up",
        error="",
        cost=TOLD.target.scaled(target),
        num_slots=20_000,
        max_tokens=512,
        drafters={"small": drafter},
        collocated=False,
        trips=trips,
        after_drafting=AFTER_DRAFTING,
    )


def log() -> AcceptanceTable:
    """What the drafter says along answers."""
    parts = [
        choices(AcceptanceModel(), QUALITY, "chat", seed, 0, num_positions=60, num_astray=0, width=4)
        for seed in range(40)
    ]
    return AcceptanceTable(
        drafters=["small"],
        domains=["chat"] * len(parts),
        width=4,
        drafter=np.zeros(60 * len(parts), np.int16),
        answer=np.repeat(np.arange(len(parts), dtype=np.int32), 60),
        position=np.tile(np.arange(1, 61, dtype=np.int32), len(parts)),
        logp=np.concatenate([part.logp for part in parts]).astype(np.float32),
        rank=np.concatenate([part.rank for part in parts]).astype(np.int8),
    )


def served(
    profile: HardwareProfile,
    table: AcceptanceTable,
    policy: str,
    phase: str,
    load: float,
    seed: int,
    *,
    ahead: bool = False,
) -> ServedRun:
    """A run on the known machine, as if it had been measured; plain steps are sent `ahead`, or in turn."""
    rng = np.random.default_rng((seed, 7))
    config = parse(f"{policy}/sarathi").config
    scheduler = config.scheduler.model_copy(update={"async_scheduling": ahead})
    debug = DebugConfig(decisions=10_000)
    config = config.model_copy(update={"debug": debug, "scheduler": scheduler})
    options = Options(seed=seed, jitter=0.05, acceptance=RecordedAcceptance(table), believed=TOLD)
    cell = Cell(profile, System(policy, config), options)
    times = np.cumsum(rng.exponential(1.0 / (load * SATURATION), size=30)).tolist()
    asked = [
        SimRequest(
            request_id=f"r{number}",
            kind="chat",
            arrival_s=time,
            num_prompt=int(rng.integers(8, 40)),
            num_output=int(rng.integers(16, 60)),
            objective=Objective(tpot_ms=7.0),
            seed=key_of(seed, number) >> 1,
        )
        for number, time in enumerate(times)
    ]
    for request in asked:
        cell.submit(request)
    cell.run()
    answered = [
        ServedRequest(
            domain="chat",
            arrival_s=request.arrival_s,
            objective=request.objective,
            receipt=cell.receipts[request.request_id][1],
            max_tokens=request.num_output,
            client_ms=None,
        )
        for request in asked
    ]
    return ServedRun(
        policy=policy,
        config=config.model_dump(mode="json"),
        phase=phase,
        load=load,
        seed=seed,
        duration_s=max(at for at, _ in cell.receipts.values()),
        requests=answered,
        steps=read_steps(newest_decisions(cell.core, 10_000) or b""),
    )


STEP = StepSample(num_requests=1, num_tokens=1, num_committed=1, profile_s=0.0, forward_s=0.0, whole_s=0.0)


def record_of(
    runs: list[ServedRun], profile: CostProfile = TOLD, acceptance_file: str = ""
) -> FidelityRecord:
    """What was measured on a cell that was told these costs."""
    return FidelityRecord(
        environment={},
        profile=profile,
        num_slots=20_000,
        max_tokens=512,
        saturation=SATURATION,
        acceptance_file=acceptance_file,
        runs=runs,
    )


def calibrated_on(steps: list[StepSample], profile: CostProfile = TOLD) -> FidelityRecord:
    """One calibration run with these steps."""
    run = ServedRun(
        policy="autoregressive",
        config={},
        phase=CALIBRATION,
        load=0.5,
        seed=0,
        duration_s=1.0,
        requests=[],
        steps=steps,
    )
    return record_of([run], profile)
