"""The default policy: what it expects of drafters that cost nothing, and how it probes while it rests."""

from __future__ import annotations

from dataclasses import replace

from cluster.config import PolicyConfig
from cluster.policies.flotilla import PROBE_DEPTH, Flotilla
from tests.cluster.policies.batches import context, request


def test_of_a_cheap_drafter_only_what_it_is_sure_of_is_counted_as_verified() -> None:
    """At the same rate a model's drafts do not pay, and those that are looked up do."""
    policy = Flotilla(PolicyConfig(max_depth=6))
    batch = [request(str(number), rate=0.45) for number in range(8)]
    looked_up = context(draft_s=0.0, token_s=7e-4, verify_s=4e-3, overhead_s=1e-4)
    by_model = context(draft_s=1.5e-3, token_s=7e-4, verify_s=4e-3, overhead_s=1e-4)
    policy._next_probe = 1000
    assert all(plan.depth == 6 for plan in policy.plan(batch, looked_up))
    assert all(plan.depth == 0 for plan in policy.plan(batch, by_model))


def test_a_probe_is_as_deep_as_drafts_are() -> None:
    """Calls of one layer say little of what deeper ones take."""
    policy = Flotilla(PolicyConfig(max_depth=6))
    batch = [request(str(number), rate=0.1, max_draft=2 + number) for number in range(3)]
    plans = policy.plan(batch, context(draft_s=5e-2))
    assert [plan.depth for plan in plans] == [2, PROBE_DEPTH, PROBE_DEPTH]
    assert all(plan.depth == 0 for plan in policy.plan(batch, context(draft_s=5e-2)))


def test_what_prompts_pay_for_is_not_saved_by_drafts() -> None:
    """Without prompts in every step a step saved is its whole time; with them, hardly more than its rows."""
    policy, batch = (
        Flotilla(PolicyConfig(max_depth=6)),
        [request(str(number), rate=0.7) for number in range(8)],
    )
    policy._next_probe = 1000
    alone = context(draft_s=3e-4, token_s=3e-4, verify_s=5e-3)
    assert all(plan.depth > 0 for plan in policy.plan(batch, alone))
    assert all(plan.depth == 0 for plan in policy.plan(batch, replace(alone, prompt_share=1.0)))


def test_it_rests_also_where_no_drafter_has_read_the_prompts() -> None:
    """Else it would plan every step for requests that cannot be drafted for."""
    policy = Flotilla(PolicyConfig(max_depth=6))
    now = context()
    unread = [request(str(number), drafter="", max_draft=0, rate=0.0) for number in range(8)]
    assert all(plan.depth == 0 for plan in policy.plan(unread, now))
    assert policy.rests(8, now.step + 1)
    assert not policy.rests(1, now.step + 1)
