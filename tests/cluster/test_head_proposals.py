"""The target evaluates its heads for those who draft from them, and now and then to see whether that pays."""

from __future__ import annotations

import math
import random
from collections import deque
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

from cluster.config import FlotillaConfig
from cluster.core import SchedulerCore
from cluster.cost_model import VERIFY_DRAFTED, VERIFY_PLAIN, CostModel, CostProfile, LinearCost
from cluster.events import (
    Draft,
    DraftDone,
    DrafterReady,
    Event,
    RequestArrived,
    VerifierReady,
    Verify,
    VerifyDone,
)
from cluster.head_proposals import PROBE_STEPS
from cluster.policies.base import Rests
from cluster.policies.flotilla import REST_STEPS
from cluster.policies.probing import LEAST_INTERVAL, PROBE_RUN
from cluster.policies.registry import make_policy
from cluster.stream_messages import Speculation, Submit
from drafters.heads_drafter import HeadsDrafter
from drafters.messages import DraftPlan
from engine.proposals import Proposals
from engine.sampling_params import SamplingParams
from tests.cluster.simulated import VOCAB, SimulatedTarget, next_token
from verifier.messages import PrefillItem, Verdict, VerifyCall, VerifyItem

HEADS, CANDIDATES, LAYERS = 3, 4, 6
HEAD = LinearCost(delta=2e-4, rho=1e-4)
CHEAP = CostProfile(target=LinearCost(delta=1e-2, gamma=1e-5), drafters={"heads": HEAD}, overhead_s=1e-3)
# Every row costs as much as a forward: nothing drafted is worth verifying.
DEAR = msgspec.structs.replace(CHEAP, target=LinearCost(delta=1e-3, gamma=1e-2))
OVERHEAD_S = 1e-3
DRAFT_S = 1e-4


class HeadsWorld:
    """The core, a simulated target whose heads are right with a given probability, and the heads drafter."""

    def __init__(
        self,
        policy: str,
        profile: CostProfile,
        accuracy: float,
        kind: Literal["heads", "eagle"] = "heads",
        ends_at: int = 99,
        **options: object,
    ) -> None:
        raw = {
            "target": {"path": "simulated"},
            "policy": {"name": policy, **options},
            "selector": {"name": "fixed"},
        }
        config = FlotillaConfig.model_validate(raw)
        self.profile, self.accuracy, self.rng = profile, accuracy, random.Random(0)
        self.core = SchedulerCore(config, make_policy(config.policy), CostModel(profile))
        self.target = SimulatedTarget(num_slots=8000, max_tokens=2000)
        self.kind, self.ends_at = kind, ends_at
        self.drafter = HeadsDrafter(
            num_heads=HEADS if kind == "heads" else LAYERS,
            vocab_size=VOCAB,
            max_tokens=2000,
            num_candidates=CANDIDATES,
            kind=kind,
        )
        self.now, self.calls, self.evaluated_s = 0.0, list[VerifyCall](), 0.0
        self.plans: list[list[DraftPlan]] = []
        self._events: deque[Event] = deque(
            [VerifierReady(8000, 2000, VOCAB), DrafterReady("heads", self.drafter.capabilities, 64)]
        )
        self.submit(-1, 1)  # while it is served, all others arrive: they are prefilled together

    def submit(self, number: int, max_tokens: int, **changes: Any) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        prompt = [number + 1, 3, 5]
        submit = Submit(request_id=f"r{number}", prompt=prompt, sampling=sampling, **changes)
        self._events.append(RequestArrived(submit, "client"))

    def run(self, num_steps: int = 1 << 20) -> None:
        """Until so many more verify calls are served, or nothing is left to do."""
        until = len(self.calls) + num_steps
        while self._events and len(self.calls) < until:
            event = self._events.popleft()
            for action in [*self.core.handle(event, self.now), *self.core.reflect()]:
                if isinstance(action, Draft):
                    self.plans.append([item.plan for item in action.call.items])
                    result = self.drafter.draft(action.call)
                    seconds = result.forward_seconds + DRAFT_S
                    self.now += DRAFT_S
                    self._events.append(DraftDone("heads", msgspec.structs.replace(result, seconds=seconds)))
                elif isinstance(action, Verify):
                    self._verify(action.call)

    def _verify(self, call: VerifyCall) -> None:
        self.calls.append(call)
        tokens = sum(len(item.tree) for item in call.verify) + sum(item.num_tokens for item in call.prefill)
        forward_s = self.profile.target.seconds(len(call.verify) + len(call.prefill), tokens, 0)
        result = self.target.step(call)
        items: list[VerifyItem | PrefillItem] = [*call.verify, *call.prefill]
        asking = {item.request_id: item for item in items if item.num_candidates}
        most = max((item.num_heads or HEADS for item in asking.values()), default=0)
        heads_s = most * HEAD.seconds(len(asking), len(asking), 0) if asking else 0.0
        self.evaluated_s += heads_s

        def proposing(verdict: Verdict | None) -> Verdict | None:
            item = asking.get(verdict.request_id) if verdict is not None else None
            if verdict is None or item is None:
                return verdict
            return msgspec.structs.replace(verdict, proposals=self._proposals(item, heads_s / len(asking)))

        self.now += forward_s + heads_s + OVERHEAD_S
        result = msgspec.structs.replace(
            result,
            forward_seconds=forward_s,
            verdicts=[proposing(verdict) for verdict in result.verdicts],
            prefills=[msgspec.structs.replace(p, verdict=proposing(p.verdict)) for p in result.prefills],
        )
        self._events.append(VerifyDone(result))

    def _proposals(self, item: VerifyItem | PrefillItem, seconds: float) -> Proposals:
        tokens = list(self.target.held[item.request_id][1])
        position, rows = len(tokens), []
        for _ in range(min(item.num_heads or HEADS, self.ends_at)):
            tokens.append(next_token(tokens))
            first = tokens[-1] if self.rng.random() < self.accuracy else (tokens[-1] + 9) % VOCAB
            rows.append([(first + i) % VOCAB for i in range(item.num_candidates)])
        logp = np.log(np.linspace(0.9, 0.01, item.num_candidates, dtype=np.float32))
        token = np.array(rows, dtype=np.int32)
        return Proposals(
            position=position,
            token=token,
            logp=np.tile(logp, (len(rows), 1)).astype(np.float32),
            parent=None if self.kind == "heads" else np.zeros_like(token),
            seconds=seconds,
        )


def asked(call: VerifyCall) -> dict[str, tuple[int, int]]:
    """Heads and candidates wanted, by request."""
    items: list[VerifyItem | PrefillItem] = [*call.verify, *call.prefill]
    return {i.request_id: (i.num_heads or 0, i.num_candidates) for i in items if i.num_candidates}


def drafted(call: VerifyCall) -> bool:
    return any(len(item.tree) > 1 for item in call.verify)


@pytest.mark.parametrize("policy", ["flotilla", "smartspec"])
def test_while_drafting_does_not_pay_the_heads_are_asked_once_in_many_steps(policy: str) -> None:
    world = HeadsWorld(policy, DEAR, 0.3)
    for number in range(8):
        world.submit(number, 400)
    world.run()
    later = world.calls[PROBE_STEPS:]
    asking = [call for call in later if asked(call)]
    # A probe, and now and then the step after it where the policy had its own probe in that; the default
    # has several in a row.
    own = PROBE_RUN * (len(later) / LEAST_INTERVAL + 1) if policy == "flotilla" else 0
    assert len(later) / PROBE_STEPS / 2 <= len(asking) <= 2 * len(later) / PROBE_STEPS + 1 + own
    # All at once, for a policy that saw a few at a time would find that those few do not pay.
    assert all(len(asked(call)) == 8 for call in asking)
    assert sum(drafted(call) for call in later) <= len(later) / PROBE_STEPS + 1 + own


def test_without_speculation_the_heads_are_left_alone() -> None:
    world = HeadsWorld("autoregressive", CHEAP, 0.9)
    for number in range(4):
        world.submit(number, 100)
    world.run()
    assert not any(map(asked, world.calls))


def test_a_policy_that_rests_is_left_in_peace() -> None:
    world = HeadsWorld("flotilla", DEAR, 0.3)
    for number in range(8):
        world.submit(number, 300)
    num_resting = 0
    while len(world.calls) < 250:
        world.run(1)
        policy, step = world.core.planner.policy, world.core.totals.steps
        assert isinstance(policy, Rests)
        if policy.rests(8, step + 1):
            num_resting += 1
            assert not asked(world.calls[-1])
    assert num_resting > 80


@pytest.mark.parametrize("policy", ["flotilla", "smartspec"])
def test_drafting_resumes_soon_when_it_pays_again(policy: str) -> None:
    world = HeadsWorld(policy, DEAR, 0.9)
    for number in range(8):
        world.submit(number, 900)
    world.run(150)
    assert not any(map(drafted, world.calls[-PROBE_STEPS // 2 :]))
    world.profile = world.core.cost.profile = CHEAP
    world.run(PROBE_STEPS + REST_STEPS + 2)
    assert drafted(world.calls[-1])
    world.run(50)
    assert all(map(drafted, world.calls[-50:]))
    assert all(len(asked(call)) == 8 for call in world.calls[-50:])


def test_with_fewer_requests_the_heads_are_asked_at_once() -> None:
    world = HeadsWorld("smartspec", DEAR, 0.9)
    for number in range(8):
        world.submit(number, 20 if number > 2 else 400)
    world.run(100)
    first = next(i for i, call in enumerate(world.calls) if i > 2 and len(call.verify) == 3)
    assert asked(world.calls[first])


@pytest.mark.parametrize("policy", ["flotilla", "smartspec", "fixed"])
def test_right_heads_are_drafted_from_in_every_step(policy: str) -> None:
    world = HeadsWorld(policy, CHEAP, 0.95)
    for number in range(4):
        world.submit(number, 200)
    world.run()
    verifying = [call for call in world.calls if call.verify]
    # But for the very end, which a request reaches with a token or two to go.
    assert sum(map(drafted, verifying)) >= len(verifying) - 4
    assert world.core.totals.accepted_tokens > world.core.totals.iterations


def test_heads_and_candidates_are_those_that_the_plan_can_use() -> None:
    world = HeadsWorld("fixed", CHEAP, 0.95, fixed_depth=2)
    world.submit(0, 200)
    world.run()
    wanted = [found["r0"] for found in map(asked, world.calls) if found]
    assert wanted[0] == (HEADS, CANDIDATES)
    shares = {one: wanted.count(one) for one in set(wanted)}
    # All of them now and then; near its end it cannot use two heads.
    assert shares.pop((2, 1)) > 0.85 * len(wanted)
    assert shares.pop((HEADS, CANDIDATES)) <= len(wanted) / PROBE_STEPS + 2
    assert set(shares) <= {(1, 1), (1, CANDIDATES), (2, CANDIDATES)}


def test_who_does_not_speculate_or_ends_with_the_step_is_not_asked_for() -> None:
    world = HeadsWorld("fixed", CHEAP, 0.9)
    world.submit(0, 50, speculation=Speculation(mode="off"))
    world.submit(1, 2)  # one token with the prompt, and the next is its last
    world.submit(2, 50)
    world.run()
    assert {name for call in world.calls for name in asked(call)} == {"r2"}


def test_the_heads_are_charged_once_and_plain_steps_do_without_them() -> None:
    world = HeadsWorld("fixed", CHEAP, 0.9, fixed_depth=3)
    for number in range(4):
        world.submit(number, 300)
    world.run(60)
    planner, cost = world.core.planner, world.core.cost
    assert cost.correction("heads") == pytest.approx(1.0, rel=0.2)  # the drafter's own time is in it
    assert cost.correction(VERIFY_DRAFTED) == pytest.approx(1.0, rel=0.05)
    # What is left of a step is neither the heads' time nor a part of it.
    assert planner.overhead.drafted_s(4) == pytest.approx(OVERHEAD_S, rel=0.1)
    totals, num_drafts = world.core.totals, len(world.plans)
    assert totals.step_draft_s == pytest.approx(world.evaluated_s + num_drafts * DRAFT_S, rel=0.1)

    world = HeadsWorld("flotilla", DEAR, 0.3)
    for number in range(8):
        world.submit(number, 300)
    world.run()
    assert world.core.cost.correction(VERIFY_PLAIN) == pytest.approx(1.0, rel=0.02)
    assert world.core.planner.overhead.plain_s(8) == pytest.approx(OVERHEAD_S, rel=0.05)


def test_a_shallow_draft_from_many_heads_does_not_make_them_look_dear() -> None:
    world = HeadsWorld("fixed", CHEAP, 0.9, fixed_depth=1)
    for number in range(4):
        world.submit(number, 400)
    world.run()
    assert world.core.cost.correction("heads") == pytest.approx(1.0, rel=0.35)


def test_of_eagle_a_beam_of_the_planned_shape_is_asked_and_a_layer_more_where_all_is_used() -> None:
    world = HeadsWorld("fixed", CHEAP, 0.95, kind="eagle", fixed_depth=3, max_width=1)
    world.submit(0, 200)
    world.run(30)
    wanted = [found["r0"] for found in map(asked, world.calls) if found]
    assert wanted[0] == (LAYERS, 1)  # how wide is for the policy to say
    # Three of six were used, and then three of three: a fourth is offered, and not taken.
    assert wanted[1:5] == [(3, 1), (4, 1), (3, 1), (4, 1)]
    for number in (1, 2):  # beside it, and after it
        world.submit(number, 60)
        world.run(60)
        newcomer = next(found[f"r{number}"] for found in map(asked, world.calls) if f"r{number}" in found)
        assert newcomer in {(3, 1), (4, 1)}  # as the others, not all there is
        (first,) = [
            call for call in world.calls if f"r{number}" in {item.request_id for item in call.prefill}
        ]
        assert f"r{number}" in asked(first)


def test_a_beam_that_ended_for_want_of_likely_paths_is_asked_for_as_deep_again() -> None:
    world = HeadsWorld("flotilla", CHEAP, 0.95, kind="eagle", ends_at=2)
    world.submit(0, 200)
    world.run(30)
    assert asked(world.calls[-1])["r0"][0] == LAYERS
    assert all(map(drafted, world.calls[5:]))


def test_a_beam_ends_by_what_the_last_plan_said_of_likely_paths_and_tokens() -> None:
    world = HeadsWorld("flotilla", CHEAP, 0.95, kind="eagle")
    world.submit(0, 200)
    world.run(30)
    (plan,), (item,) = world.plans[-1], world.calls[-1].verify
    assert -20 < plan.stop_logp < 0
    assert -20 < plan.least_forward_logp < 0
    assert item.least_logp == max(plan.stop_logp, plan.least_forward_logp)
    world = HeadsWorld("threshold", CHEAP, 0.95, kind="eagle", confidence_threshold=0.4)
    world.submit(0, 200)
    world.run(30)
    assert world.calls[-1].verify[0].stop_token_logp == math.log(0.4)
    world.submit(1, 200)
    world.run(4)
    (first,) = [item for call in world.calls for item in call.prefill if item.request_id == "r1"]
    assert (first.num_candidates, first.stop_token_logp) == (1, math.log(0.4))


def test_eagle_is_asked_for_as_wide_a_beam_as_the_policy_takes_for_so_many() -> None:
    world = HeadsWorld("adaserve", CHEAP, 0.9, kind="eagle", max_width=3, draft_budget=6)
    world.submit(0, 300)
    world.run(20)
    assert asked(world.calls[-1])["r0"][1] == 3
    for number in range(1, 4):
        world.submit(number, 60)
    world.run(8)
    assert {width for _, width in asked(world.calls[-1]).values()} == {1}
    world.run(60)
    assert asked(world.calls[-1])["r0"][1] == 3


def test_while_drafting_does_not_pay_eagle_is_asked_once_in_many_steps() -> None:
    world = HeadsWorld("smartspec", DEAR, 0.3, kind="eagle")
    for number in range(8):
        world.submit(number, 400)
    world.run()
    later = world.calls[PROBE_STEPS:]
    asking = [call for call in later if asked(call)]
    assert len(later) / PROBE_STEPS / 2 <= len(asking) <= 2 * len(later) / PROBE_STEPS + 1
    assert all(len(asked(call)) == 8 for call in asking)


@pytest.mark.parametrize("kind", ["heads", "eagle"])
def test_a_request_that_comes_when_another_has_ended_is_drafted_for_at_once(
    kind: Literal["heads", "eagle"],
) -> None:
    world = HeadsWorld("flotilla", CHEAP, 0.95, kind=kind)
    for number in range(3):
        world.submit(number, 40)
        world.run()
    for number in range(1, 3):
        (first,) = [
            call for call in world.calls if f"r{number}" in {item.request_id for item in call.prefill}
        ]
        assert f"r{number}" in asked(first)
        verified = [call for call in world.calls if call.verify and call.verify[0].request_id == f"r{number}"]
        assert drafted(verified[0])
