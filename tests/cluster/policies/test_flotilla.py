"""The default policy: what it expects of drafters that cost nothing, and how it probes while it rests."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import PolicyConfig
from cluster.cost_model import CostModel, CostProfile
from cluster.linear_cost import LinearCost
from cluster.policies.base import StepContext
from cluster.policies.decode_batch import DecodeBatch
from cluster.policies.flotilla import PROBE_DEPTH, STILL_PAYS, Flotilla
from cluster.policies.outlook import ALIKE
from cluster.policies.probing import PROBE_RUN, Probing
from cluster.policies.step_seconds import MOST_ON_PROMPTS, drafted_step_s
from engine.tree import TokenTree
from tests.cluster.policies.batches import context, request


def test_of_a_cheap_drafter_only_what_it_is_sure_of_is_counted_as_verified() -> None:
    """At the same rate a model's drafts do not pay, and those that are looked up do."""
    policy = Flotilla(PolicyConfig(max_depth=6))
    batch = [request(str(number), rate=0.45) for number in range(8)]
    looked_up = context(draft_s=0.0, token_s=7e-4, verify_s=4e-3, overhead_s=1e-4)
    by_model = context(draft_s=1.5e-3, token_s=7e-4, verify_s=4e-3, overhead_s=1e-4)
    policy._try_drafts = Probing(1000)
    assert all(plan.depth == 6 for plan in policy.plan(batch, looked_up))
    assert all(plan.depth == 0 for plan in policy.plan(batch, by_model))


def test_a_probe_is_as_deep_as_drafts_are() -> None:
    """Calls of one layer say little of what deeper ones take."""
    policy = Flotilla(PolicyConfig(max_depth=6))
    batch = [request(str(number), rate=0.1, max_draft=2 + number) for number in range(3)]
    for step in range(PROBE_RUN):
        plans = policy.plan(batch, replace(context(draft_s=5e-2), step=step))
        assert [plan.depth for plan in plans] == [2, PROBE_DEPTH, PROBE_DEPTH]
    later = replace(context(draft_s=5e-2), step=PROBE_RUN)
    assert all(plan.depth == 0 for plan in policy.plan(batch, later))


def test_what_prompts_pay_for_is_not_saved_by_drafts() -> None:
    """Without prompts in every step a step saved is its whole time; with them, hardly more than its rows."""
    policy, batch = (
        Flotilla(PolicyConfig(max_depth=6)),
        [request(str(number), rate=0.7) for number in range(8)],
    )
    policy._try_drafts = Probing(1000)
    alone = context(draft_s=3e-4, token_s=3e-4, verify_s=5e-3)
    assert all(plan.depth > 0 for plan in policy.plan(batch, alone))
    assert all(plan.depth == 0 for plan in policy.plan(batch, replace(alone, prompt_share=1.0)))


OVERHEADS_S = st.sampled_from([0.0, 1e-9, 1e-3, 3e-3, 1e-2])


@given(OVERHEADS_S, OVERHEADS_S, st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_prompts_never_pay_for_a_whole_step(plain_s: float, drafted_s: float, share: float) -> None:
    """Also where drafted steps were measured to take less besides forwards and drafting than plain ones."""
    now = replace(
        context(draft_s=3e-4, token_s=1e-6, verify_s=2e-3),
        plain_overhead_s=plain_s,
        draft_overhead_s=drafted_s,
        prompt_share=share,
    )
    batch = DecodeBatch([request(str(number), rate=0.7) for number in range(8)])
    outlook = Flotilla(PolicyConfig(max_depth=6))._look(batch, 1, now)
    assert outlook.depth > 0
    expected = sum(0.7**k for k in range(outlook.depth + 1)) * len(batch)
    for tokens, rate, whole_s in (
        (expected, outlook.drafted, outlook.drafted_s),
        (len(batch), outlook.plain, outlook.plain_s),
    ):
        least_s = (1.0 - min(share**8, MOST_ON_PROMPTS)) * whole_s
        assert least_s * (1.0 - 1e-9) <= tokens / rate <= whole_s * (1.0 + 1e-9)
    whole_s, base_s = drafted_step_s(batch, 8, now)
    assert 0.0 < base_s <= whole_s


def test_of_many_requests_a_layer_must_bring_what_its_forward_costs_in_tokens() -> None:
    """The rule is in tokens; a second is worth what the step planned last yields in it."""
    policy = Flotilla(PolicyConfig(max_depth=6))
    policy._try_drafts = policy._try_plain = Probing(1000)
    many = [request(str(number), rate=0.8) for number in range(12)]
    now = context(draft_s=1e-3)
    assert {plan.depth for plan in policy.plan(many, now)} == {6}
    assert all(plan.least_forward_logp == -math.inf for plan in policy.plan(many, now))
    rule = policy.stop_rule("small", 12, many, now)
    assert rule is not None
    outlook = policy._look(DecodeBatch(many), 1, now)
    goodput = max(outlook.drafted, outlook.plain)
    assert rule.rate == pytest.approx(0.8)
    forward_s = now.cost.draft_layer_seconds("small", 12, 1, 12 * 50)
    assert rule.forward_tokens + 12 * rule.row_tokens == pytest.approx(goodput * forward_s)
    (token_s,) = now.cost.verify_added_seconds(12, 1, 50)
    assert rule.verify_tokens == pytest.approx(goodput * token_s)


def test_drafts_sent_ahead_are_planned_as_deep_as_has_the_highest_goodput() -> None:
    """Drafters find out how deep drafts of many pay; what is sent ahead is computed as deep as planned."""
    policy = Flotilla(PolicyConfig(max_depth=6))
    policy._try_drafts = policy._try_plain = Probing(1000)
    many = [request(str(number), rate=0.8) for number in range(12)]
    now = context(draft_s=1e-3)
    ahead = replace(now, is_ahead=True)
    outlook = policy._look(DecodeBatch(many), 1, now)
    assert 0 < outlook.depth < 6
    assert {plan.depth for plan in policy.plan(many, ahead)} == {outlook.depth}
    # Few are planned for one by one, but none deeper than pays for all of them.
    few = [request("sure", rate=0.9), request("unsure", rate=0.4), request("too", rate=0.4)]
    dearer = context(draft_s=2e-3)
    deepest = policy._look(DecodeBatch(few), 1, dearer).depth
    assert 0 < deepest < 6
    assert policy.plan(few, replace(dearer, is_ahead=True))[0].depth == deepest
    assert policy.plan(few, dearer)[0].depth == 6


def test_drafts_sent_ahead_stay_as_deep_while_that_is_about_as_good() -> None:
    policy = Flotilla(PolicyConfig(max_depth=6))
    policy._try_drafts = policy._try_plain = Probing(1000)
    ahead = replace(context(draft_s=1e-3), is_ahead=True)

    def depth_at(rate: float) -> int:
        (depth,) = {
            plan.depth for plan in policy.plan([request(str(n), rate=rate) for n in range(12)], ahead)
        }
        return depth

    rates = np.linspace(0.55, 0.85, 61).tolist()
    rising, falling = list(map(depth_at, rates)), list(map(depth_at, reversed(rates)))[::-1]
    best = [
        policy._look(DecodeBatch([request(str(n), rate=rate) for n in range(12)]), 1, ahead) for rate in rates
    ]
    assert rising[0] < rising[-1]
    # It follows late, both ways, and by no more than predictions are worth.
    assert any(up < down for up, down in zip(rising, falling, strict=True))
    assert all(up <= down for up, down in zip(rising, falling, strict=True))
    for outlook, up, down in zip(best, rising, falling, strict=True):
        assert min(outlook.by_depth[up], outlook.by_depth[down]) >= ALIKE * outlook.by_depth[outlook.depth]


def test_few_requests_and_drafters_that_cost_nothing_have_no_rule() -> None:
    policy = Flotilla(PolicyConfig(max_depth=6))
    many = [request(str(number)) for number in range(12)]
    policy.plan(many[:4], context())
    assert policy.stop_rule("small", 4, many[:4], context()) is None
    looked_up = [request(str(number), drafter="lookup") for number in range(12)]
    policy.plan(looked_up, context())
    assert policy.stop_rule("lookup", 12, looked_up, context()) is None


def test_nothing_ends_a_probe_that_is_likely_at_all() -> None:
    """It is there to find out what drafts cost and bring now, at the depth that is usual."""
    policy = Flotilla(PolicyConfig(max_depth=6))
    many = [request(str(number), rate=0.1) for number in range(12)]
    dear = context(draft_s=5e-2)
    assert {plan.depth for plan in policy.plan(many, dear)} == {PROBE_DEPTH}
    rule = policy.stop_rule("small", 12, many, dear)
    assert rule is not None
    assert rule.pays([1e-6] * 12)


@pytest.mark.parametrize("drafter", ["", "small"])
def test_a_step_that_is_all_fixed_cost_and_always_has_prompts_is_planned(drafter: str) -> None:
    """Rows cost nothing, as on a large machine far from its knee: decoding seems to take no time at all."""
    policy = Flotilla(PolicyConfig(max_depth=6))
    profile = CostProfile(target=LinearCost(delta=1e-2), drafters={"small": LinearCost(delta=3e-4)})
    free = replace(context(), cost=CostModel(profile), draft_s=0.0, prompt_share=1.0)
    max_draft = 6 if drafter else 0
    batch = [request("r", drafter=drafter, max_draft=max_draft, rate=0.7)]
    (plan,) = policy.plan(batch, free)
    assert 0 <= plan.depth <= max_draft
    (nodes,) = policy.select(batch, [TokenTree.root_only(1)], free)
    assert nodes.tolist() == [0]


def test_it_rests_also_where_no_drafter_has_read_the_prompts() -> None:
    """Else it would plan every step for requests that cannot be drafted for."""
    policy = Flotilla(PolicyConfig(max_depth=6))
    now = context()
    unread = [request(str(number), drafter="", max_draft=0, rate=0.0) for number in range(8)]
    assert all(plan.depth == 0 for plan in policy.plan(unread, now))
    assert policy.rests(8, now.step + 1)
    assert not policy.rests(1, now.step + 1)


@pytest.mark.parametrize(("sends_ahead", "num_steps"), [(False, 4), (True, 12)])
def test_it_rests_for_longer_where_plain_steps_are_sent_ahead(sends_ahead: bool, num_steps: int) -> None:
    """Beside objectives, which make it look again soon: the target waits for each look."""
    policy = Flotilla(PolicyConfig(max_depth=6))
    now = replace(context(), sends_ahead=sends_ahead)
    unread = [request(str(number), drafter="", max_draft=0, rate=0.0, tpot_s=1.0) for number in range(8)]
    assert all(plan.depth == 0 for plan in policy.plan(unread, now))
    rests = [policy.rests(8, now.step + step) for step in range(20)]
    assert rests == [step < num_steps for step in range(20)]


@pytest.mark.parametrize(
    ("sends_ahead", "tpot_s", "expected"),
    [(True, None, [4, 8, 8, 8]), (False, None, [4, 4, 4, 4]), (True, 1.0, [4, 4, 4, 4])],
)
def test_the_same_few_requests_are_looked_at_more_seldom(
    sends_ahead: bool, tpot_s: float | None, expected: list[int]
) -> None:
    policy = Flotilla(PolicyConfig(max_depth=6))
    policy._try_drafts = Probing(1000)
    now = replace(context(draft_s=5e-2), sends_ahead=sends_ahead, step=0)

    def looks(name: str, num_looks: int) -> list[int]:
        nonlocal now
        found = []
        for _ in range(num_looks):
            assert policy.plan([request(name, rate=0.3, tpot_s=tpot_s)], now)[0].depth == 0
            steps = 0
            while policy.rests(1, now.step + steps):
                steps += 1
            found.append(steps)
            now = replace(now, step=now.step + steps)
        return found

    assert looks("one", 4) == expected
    assert looks("other", 2) == expected[:2]


def test_looking_ahead_it_rests_on_where_drafts_would_not_pay() -> None:
    policy = Flotilla(PolicyConfig(max_depth=6))
    policy._try_drafts = Probing(1000)
    costly, cheap = context(draft_s=5e-2), context(draft_s=1e-4)
    batch = [request(str(number), rate=0.7) for number in range(8)]
    assert all(plan.depth == 0 for plan in policy.plan(batch, costly))
    end = costly.step
    while policy.rests(8, end):
        end += 1
    policy.look_ahead(batch, replace(cheap, step=end))
    assert not policy.rests(8, end), "drafts would pay"
    policy.look_ahead(batch, replace(costly, step=end))
    assert policy.rests(8, end)
    assert policy.rests(8, 2 * end - costly.step - 1)
    assert not policy.rests(8, 2 * end - costly.step)


def test_looking_ahead_it_leaves_steps_to_those_in_need_and_to_tries() -> None:
    policy = Flotilla(PolicyConfig(max_depth=6))
    policy._try_drafts = Probing(1000)
    now = context(draft_s=1e-3, token_s=1e-3, verify_s=4e-3)
    calm = [request(str(number), rate=0.7) for number in range(8)]
    in_need = request("urgent", rate=0.7, tpot_s=0.01, num_decoded=20, decoding_s=0.2)
    policy.look_ahead([in_need, *calm], now)
    assert not policy.rests(9, now.step)
    policy.look_ahead(calm, now)
    assert policy.rests(8, now.step)
    trying = Flotilla(PolicyConfig(max_depth=6))  # at the first step it tries drafts
    trying.look_ahead(calm, now)
    assert not trying.rests(8, now.step)


@pytest.mark.parametrize(("draft_s", "drafts"), [(1e-3, True), (4e-3, False)])
def test_beside_a_request_in_need_the_others_draft_unless_all_lose_by_it(
    draft_s: float, drafts: bool
) -> None:
    """What drafting takes besides their rows is spent then; alone they would not draft."""
    policy = Flotilla(PolicyConfig(max_depth=6))
    policy._try_drafts = Probing(1000)
    now = context(draft_s=draft_s, token_s=1e-3, verify_s=4e-3)
    calm = [request(str(number), rate=0.7) for number in range(8)]
    assert all(plan.depth == 0 for plan in policy.plan(calm, now))
    in_need = request("urgent", rate=0.7, tpot_s=0.01, num_decoded=20, decoding_s=0.2)
    assert {plan.depth > 0 for plan in policy.plan([in_need, *calm], now)} == {drafts}


@pytest.mark.parametrize(
    ("draft_s", "tpot_s", "drafts"),
    [
        (3.5e-3, 0.013, True),  # 4 % fewer tokens a second, and all of the sure ones on time
        (5.5e-3, 0.013, False),  # 12 % fewer
        (3.5e-3, 0.0115, False),  # late either way
        (3.5e-3, 0.016, False),  # on time without
    ],
)
def test_some_goodput_is_given_up_by_drafting_where_that_keeps_more_on_time(
    draft_s: float, tpot_s: float, drafts: bool
) -> None:
    """Plain steps are late for all alike; with drafts, at least those are on time that many are right for."""
    policy = Flotilla(PolicyConfig(max_depth=6))
    policy._try_drafts = Probing(1000)
    now = context(draft_s=draft_s, token_s=5e-4, verify_s=8e-3, overhead_s=1e-4)
    sure = [
        request(f"sure {n}", rate=0.9, tpot_s=tpot_s, num_decoded=20, decoding_s=20 * tpot_s)
        for n in range(4)
    ]
    hard = [request(f"hard {n}", rate=0.3) for n in range(6)]
    batch = [*sure, *hard]
    ahead = Flotilla(PolicyConfig(max_depth=6))
    ahead._try_drafts = Probing(1000)
    ahead.look_ahead(batch, now)
    assert ahead.rests(10, now.step) is not drafts
    assert any(plan.depth > 0 for plan in policy.plan(batch, now)) is drafts


def test_few_requests_draft_on_by_what_comes_true_of_what_their_drafter_says() -> None:
    """Beside a greedy target choices are right more often than said: drafts would end too early."""
    batch, now = [request(rate=0.7)], context(draft_s=1e-4)
    as_said = Flotilla(PolicyConfig()).plan(batch, now)[0]
    said = np.full(4000, 0.5)
    now.calibration.of("small").observe(said, np.arange(4000) % 5 > 0)
    learnt = Flotilla(PolicyConfig()).plan(batch, now)[0]
    exponent = now.calibration.of("small").exponent
    assert exponent < 0.7
    assert learnt.stop_logp == pytest.approx(as_said.stop_logp / exponent)
    assert learnt.least_forward_logp == pytest.approx(as_said.least_forward_logp / exponent)


@pytest.mark.parametrize(
    ("number", "realised", "goes_on"), [(8, 1.0, True), (8, 1.2, True), (8, 0.9, False), (4, 1.0, False)]
)
def test_many_requests_draft_on_for_a_little_less_than_plain_steps_would_bring(
    number: int, realised: float, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After plain steps their drafters would have much to read, before drafts are worth what they were."""
    batch = [request(str(n), rate=0.7) for n in range(number)]
    better, bit_worse, worse = (context(draft_s=seconds) for seconds in (4e-3, 7e-3, 1e-2))
    policy = Flotilla(PolicyConfig(max_depth=6))
    policy._try_drafts = Probing(1000)
    outlook = policy._look(DecodeBatch.of(batch), 1, bit_worse)
    assert STILL_PAYS < outlook.drafted / outlook.plain < 1.0
    monkeypatch.setattr(policy._realised, "known", lambda num_requests: realised)
    monkeypatch.setattr(policy._realised, "gain", lambda num_requests: 1.0)

    def drafts(now: StepContext) -> bool:
        return any(plan.depth > 0 for plan in policy.plan(batch, now))

    assert [drafts(now) for now in (bit_worse, better, bit_worse)] == [False, True, goes_on]
    assert [drafts(now) for now in (better, worse, bit_worse)] == [True, False, False]
