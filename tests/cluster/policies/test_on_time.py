"""Who stays on time: counted against a walk through the steps, and what the policy makes of it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import PolicyConfig
from cluster.policies.base import DecodeRequest, StepContext
from cluster.policies.flotilla import Flotilla
from cluster.policies.on_time import num_on_time
from cluster.policies.probing import PROBE_RUN, Probing
from tests.cluster.policies.batches import context, contexts, request, requests


def is_on_time(one: DecodeRequest, step_s: float, depth: int, slack_s: float) -> bool:
    """Step by step until 64 more tokens are there, a chain's tokens in each: no later than they should be."""
    if one.tpot_s is None:
        return False
    per_step, chance = 1.0, 1.0
    for _ in range(min(depth, one.max_draft) if one.drafter else 0):
        chance *= min(one.rate, 0.98)
        per_step += chance
    wanted = min(64, one.num_remaining)
    tokens, now = 0.0, one.decoding_s
    while tokens + per_step < wanted:
        tokens, now = tokens + per_step, now + step_s
    now += step_s * (wanted - tokens) / per_step  # the last one in part
    return now <= one.tpot_s * (one.num_decoded + wanted) + slack_s


@given(
    batch=st.lists(requests(), max_size=6),
    remaining=st.integers(1, 100),
    step_s=st.floats(1e-3, 0.2),
    depth=st.integers(0, 8),
)
def test_those_are_counted_who_are_on_time_when_the_steps_are_walked(
    batch: list[DecodeRequest], remaining: int, step_s: float, depth: int
) -> None:
    batch = [msgspec.structs.replace(one, num_remaining=remaining) for one in batch]
    surely, perhaps = (sum(is_on_time(one, step_s, depth, slack) for one in batch) for slack in (-1e-9, 1e-9))
    assert surely <= num_on_time(batch, step_s, depth) <= perhaps


def eight(tpot_s: float | None, draft_s: float, step: int = 1) -> tuple[list[DecodeRequest], StepContext]:
    """Eight requests, of which two, of no use to drafters, have an objective."""
    others = [request(str(number), rate=0.8) for number in range(6)]
    held = [
        request(name, rate=0.1, tpot_s=tpot_s, num_decoded=1, decoding_s=0.0, max_draft=0, drafter="")
        for name in ("x", "y")
    ]
    now = replace(context(draft_s=draft_s, token_s=3e-4, verify_s=5e-3), step=step)
    return [*others, *held], now


def drafting(policy: Flotilla, tpot_s: float | None, draft_s: float, step: int = 1) -> bool:
    """Whether any of them drafts."""
    return any(plan.depth > 0 for plan in policy.plan(*eight(tpot_s, draft_s, step)))


def new_policy() -> Flotilla:
    policy = Flotilla(PolicyConfig(max_depth=6))
    policy._try_drafts, policy._try_plain = Probing(1000), Probing(1000)
    return policy


def test_drafts_give_way_where_plain_steps_keep_more_on_time() -> None:
    """Drafts raise goodput by a tenth or by half; two requests keep 10 ms per token in plain steps only."""
    assert drafting(new_policy(), tpot_s=None, draft_s=2e-3)
    assert drafting(new_policy(), tpot_s=0.1, draft_s=2e-3)
    assert not drafting(new_policy(), tpot_s=0.01, draft_s=2e-3)
    assert drafting(new_policy(), tpot_s=0.001, draft_s=2e-3)  # lost either way
    assert drafting(new_policy(), tpot_s=0.01, draft_s=1e-4)  # too much goodput to give up


def test_drafts_that_gave_way_are_tried_all_the_same() -> None:
    """Else what drafting costs and brings would be known ever less."""
    policy = Flotilla(PolicyConfig(max_depth=6))
    policy._try_plain = Probing(1000)
    tried = [drafting(policy, tpot_s=0.01, draft_s=2e-3, step=step) for step in range(150)]
    assert tried == [True] * PROBE_RUN + [False] * (150 - PROBE_RUN)


def test_looking_ahead_it_rests_on_while_drafts_would_give_way() -> None:
    """Else every rest would end with a step in turn, and beside heads with proposals for nobody."""
    policy = new_policy()
    for tpot_s, draft_s in ((None, 2e-3), (0.1, 2e-3), (0.01, 1e-4)):
        policy.look_ahead(*eight(tpot_s, draft_s))
        assert not policy.rests(8, 1)
    policy.look_ahead(*eight(0.01, 2e-3))
    assert policy.rests(8, 1)
    trying = Flotilla(PolicyConfig(max_depth=6))
    trying.look_ahead(*eight(0.01, 2e-3))
    assert not trying.rests(8, 1)


@given(
    batch=st.lists(requests(), min_size=1, max_size=9),
    now=contexts(),
    share=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_looking_ahead_it_rests_where_it_would_plan_no_drafts(
    batch: list[DecodeRequest], now: StepContext, share: float
) -> None:
    looking, planning = new_policy(), new_policy()
    now = replace(now, prompt_share=share)
    looking.look_ahead(batch, now)
    plans = planning.plan(batch, now)
    after = now.step + 1
    if any(one.max_draft for one in batch):
        assert looking.rests(len(batch), after) == planning.rests(len(batch), after)
    else:  # a plan may be for those that are still read
        assert looking.rests(len(batch), after)
    assert not (looking.rests(len(batch), after) and any(plan.depth > 0 for plan in plans))
