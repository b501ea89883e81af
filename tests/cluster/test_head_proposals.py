"""The target evaluates its heads for those who draft from them, and now and then to see whether that pays."""

from __future__ import annotations

from typing import Literal

import pytest

from cluster.core import SchedulerCore
from cluster.cost_model import VERIFY_DRAFTED, VERIFY_PLAIN
from cluster.head_proposals import PROBE_STEPS
from cluster.policies.base import Rests
from cluster.policies.fixed import Fixed
from cluster.policies.probing import LEAST_INTERVAL, PROBE_RUN
from cluster.policies.rest import REST_STEPS
from cluster.stream_messages import Speculation
from tests.cluster.heads_world import (
    CANDIDATES,
    CHEAP,
    DEAR,
    DRAFT_S,
    OVERHEAD_S,
    HeadsWorld,
    asked,
    drafted,
)
from tests.cluster.proposing_target import LAYERS


@pytest.mark.parametrize("policy", ["flotilla", "smartspec"])
def test_while_drafting_does_not_pay_the_heads_are_asked_once_in_many_steps(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Drafts are dear here, and the default tries such more seldom than in so few steps.
    monkeypatch.setattr("cluster.policies.probing.MOST_INTERVAL", LEAST_INTERVAL)
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
    assert all(len(asked(call)) == 8 for call in asking if len(call.verify) == 8)
    assert sum(len(call.verify) == 8 for call in asking) >= len(later) / PROBE_STEPS / 2
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
        # What is proposed with the call sent last is for the step after all those at the target.
        if policy.rests(8, step + len(world.core.verify_calls.all_outstanding)):
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
    assert wanted[0] == (2, CANDIDATES)
    shares = {one: wanted.count(one) for one in set(wanted)}
    # All candidates now and then; near its end it cannot use two heads.
    assert shares.pop((2, 1)) > 0.85 * len(wanted)
    assert shares.pop((2, CANDIDATES)) <= len(wanted) / PROBE_STEPS + 2
    assert set(shares) <= {(1, 1), (1, CANDIDATES)}


@pytest.mark.parametrize(("policy", "own"), [("fixed", "fixed_depth"), ("smartspec", "max_depth")])
def test_no_layer_of_eagles_is_computed_that_the_policy_never_drafts(policy: str, own: str) -> None:
    world = HeadsWorld(policy, CHEAP, 0.95, kind="eagle", **{own: 3})
    assert LAYERS > 3
    world.submit(0, 200)
    world.run()
    layers = [found["r0"][0] for found in map(asked, world.calls) if found]
    assert max(layers) == 3
    assert layers.count(3) > 0.9 * len(layers)


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


def test_the_step_before_a_plan_is_asked_for_proposals_and_not_sent_ahead() -> None:
    """What is proposed in it the plan must not lack, though the policy still rests in it."""

    class RestsAtFirst(Fixed):
        plans_ahead = False

        def rests(self, num_requests: int, step: int) -> bool:
            return step < 20

    world = HeadsWorld("fixed", CHEAP, 0.95)
    config = world.core.config
    world.core = SchedulerCore(config, RestsAtFirst(config.policy), world.core.cost)
    world.submit(0, 60)
    world.run()
    is_ahead = [bool(call.verify) and call.verify[0].tree is None for call in world.calls]
    assert is_ahead[4:19] == [True] * 15
    assert not any(is_ahead[19:])
    assert not any(asked(call) for call in world.calls[2:19])
    assert all(asked(call) for call in world.calls[19:40])
    assert drafted(world.calls[20])
