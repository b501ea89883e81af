"""Records of pools with several instances of a kind: the instance drafted, and costs what its kind does."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cluster.config import FlotillaConfig
from cluster.cost_model import DEFAULT_PROFILE, CostModel
from cluster.decisions import StepRecord, read_entries
from cluster.events import DrafterReady
from cluster.linear_cost import LinearCost
from cluster.recorded_core import make_core
from cluster.replay import Replay, ReplayedStep
from cluster.stream_messages import Objective
from cluster.succession import take_over
from engine.sampling_params import SamplingParams
from tests.cluster.rotating import Rotate
from tests.cluster.simulated import SimulatedDrafter, submit
from tests.cluster.test_core import World

PROFILE = msgspec.structs.replace(
    DEFAULT_PROFILE,
    drafters={"good": LinearCost(gamma=2e-4, delta=1e-3), "poor": LinearCost(gamma=1e-4, delta=4e-4)},
)


@pytest.mark.parametrize("policy", ["flotilla", "adaserve", "smartspec", "specserve"])
def test_replicas_replay_the_same(tmp_path: Path, policy: str) -> None:
    world = World(7, policy)
    for name in ("good/0", "good/1"):
        world.drafters[name] = SimulatedDrafter(0.8, world.rng)
        world.handle(DrafterReady(name, world.drafters[name].capabilities, 6, kind="good"))
    file = tmp_path / "decisions.jsonl"
    raw = world.config.model_dump()
    raw["debug"] = {"decisions_file": file}
    core = make_core(FlotillaConfig.model_validate(raw), CostModel(PROFILE))
    take_over(core, world.core, world.now)
    world.core = core
    core.pool.selector = Rotate(every=2)
    for number in range(4):
        sampling = SamplingParams(temperature=0.0, max_tokens=40)
        world.send(submit(number, world.rng, sampling=sampling, objective=Objective(tpot_ms=25.0)))
    while world.answer_one():
        core.reflect()
    world.check_ends()
    entries = list(read_entries(file.read_bytes().splitlines(keepends=True)))
    steps = [step for step in Replay().run(entries) if isinstance(step, ReplayedStep)]
    assert [str(difference) for step in steps for difference in step.differences] == []
    records = [entry for entry in entries if isinstance(entry, StepRecord)]
    drafters = {draft.drafter for record in records for draft in record.drafts}
    assert {"good/0", "good/1"} <= drafters
    kinds = {pair for record in records for call in record.plans for pair in call.context.kinds.items()}
    assert kinds == {("good/0", "good"), ("good/1", "good")}
    assert {name for record in records for call in record.plans for name in call.context.calibration} <= {
        "good",
        "poor",
    }
