"""Keeping a record changes no decision: the recorded policy can what the policy can, resting included."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cluster.config import FlotillaConfig, PolicyConfig
from cluster.cost_model import DEFAULT_PROFILE, CostModel, CostProfile
from cluster.decision_log import DecisionLog
from cluster.decisions import FORMAT_VERSION, Header, StepRecord, decode_entry
from cluster.events import Action, Draft, Verify
from cluster.linear_cost import LinearCost
from cluster.policies.base import DecodeRequest, Rests, StopsDrafting
from cluster.policies.registry import POLICIES, make_policy
from cluster.recorded_core import RecordedCore, make_core, recorded
from engine.sampling_params import SamplingParams
from engine.wire import encode
from tests.cluster.simulated import submit
from tests.cluster.test_core import World

# Drafting is slow: a policy that counts costs rests for most of the time.
SLOW = LinearCost(gamma=1e-3, delta=2e-2)
PROFILE = CostProfile(target=DEFAULT_PROFILE.target, drafters={"good": SLOW, "poor": SLOW}, overhead_s=1e-3)


class ObservedWorld(World):
    """Keeps every call that its scheduler makes; with a record of so many steps, if any."""

    def __init__(self, policy: str, decisions: int, num_slots: int = 400, **scheduler: object) -> None:
        super().__init__(1, policy, num_slots=num_slots, **scheduler)
        raw: dict[str, Any] = self.config.model_dump() | {"debug": {"decisions": decisions}}
        self.calls: list[bytes] = []
        self.core = make_core(FlotillaConfig.model_validate(raw), CostModel(PROFILE))
        self.start_target()
        for name in ("good", "poor"):
            self.start_drafter(name)

    def observe(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Draft | Verify):
                self.calls.append(encode(action.call))

    def serve(self) -> None:
        for number in range(8):
            sampling = SamplingParams(temperature=0.0, max_tokens=40)
            self.send(submit(number, self.rng, sampling=sampling))
        self.drain()
        self.check_ends()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_recorded_policy_can_what_the_policy_can(policy: str) -> None:
    plain = make_policy(PolicyConfig(name=policy))
    header = Header(
        version=FORMAT_VERSION, scheduler="", flotilla="", recorded_at="", policy={}, profile=PROFILE
    )
    wrapped = recorded(plain, DecisionLog(header, 1))
    for protocol in (Rests, StopsDrafting):
        assert isinstance(wrapped, protocol) == isinstance(plain, protocol)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_same_calls_are_made_with_and_without_a_record(policy: str) -> None:
    plain, with_record = ObservedWorld(policy, 0), ObservedWorld(policy, 10_000)
    assert isinstance(with_record.core, RecordedCore)
    for world in (plain, with_record):
        world.calls = []
        world.serve()
    assert with_record.calls == plain.calls


@pytest.mark.parametrize("policy", ["autoregressive", "flotilla"])
def test_steps_in_which_the_policy_rested_are_in_the_record(policy: str) -> None:
    world = ObservedWorld(policy, 10_000, num_slots=2000)
    world.serve()
    assert isinstance(world.core, RecordedCore)
    entries = [decode_entry(line) for line in world.core.log.dump(10_000)]
    steps = [entry for entry in entries if isinstance(entry, StepRecord)]
    # Each request's first token is of its prefill.
    committed = sum(one.committed or 0 for step in steps for one in step.requests)
    assert committed == sum(map(len, world.output.values())) - len(world.output)
    rested = [step for step in steps if not step.orders]
    assert len(rested) > len(steps) / 2
    for step in rested:
        assert step.verify is not None
        assert step.verify.actual is not None
        assert step.whole is not None
        assert step.context is not None
        assert step.whole.predicted > step.verify.predicted, "what is outside the forward is predicted, too"
        assert all(not one.request.drafter for one in step.requests)


def test_a_step_sent_ahead_is_recorded_as_one_that_waited() -> None:
    found = []
    for async_scheduling in (True, False):
        world = ObservedWorld("autoregressive", 10_000, num_slots=2000, async_scheduling=async_scheduling)
        world.calls = []
        for number in range(4):
            sampling = SamplingParams(temperature=0.0, max_tokens=10 + 7 * number)
            world.send(submit(number, world.rng, sampling=sampling))
        world.drain()
        world.check_ends()
        assert isinstance(world.core, RecordedCore)
        entries = [decode_entry(line) for line in world.core.log.dump(10_000)]
        steps = [entry for entry in entries if isinstance(entry, StepRecord)]
        assert all(step.verify is not None and step.verify.actual is not None for step in steps)
        # But for the times, and the step in which one joins the others.
        of_request: dict[str, list[tuple[DecodeRequest, int]]] = {}
        for one in (one for step in steps for one in step.requests):
            entry = replace(one.request, decoding_s=0.0), one.committed
            of_request.setdefault(one.request.request_id, []).append(entry)
        found.append(of_request)
    assert found[0] == found[1]
    assert [len(found[0][f"r{number}"]) for number in range(4)] == [9, 16, 23, 30]


def test_a_record_is_for_its_owner_to_read(tmp_path: Path) -> None:
    file = tmp_path / "decisions.jsonl"
    world = ObservedWorld("adaserve", decisions=0)
    raw: dict[str, Any] = world.config.model_dump() | {"debug": {"decisions_file": file}}
    world.core = make_core(FlotillaConfig.model_validate(raw), CostModel(PROFILE))
    world.start_target()
    world.start_drafter("good")
    world.serve()
    assert isinstance(world.core, RecordedCore)
    world.core.reflect()
    assert file.stat().st_size
    assert file.stat().st_mode & 0o777 == 0o600
