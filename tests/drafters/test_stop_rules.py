"""Stop rules inside the draft loop against the same rules evaluated outside, on drafts that never stop."""

from __future__ import annotations

import functools
import itertools
import math

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drafters.messages import DraftCall, DraftPlan
from drafters.prompt_lookup import PromptLookupDrafter
from engine.sampling_params import SamplingParams
from engine.stop_rules import BEYOND_OBJECTIVE, EstimateRule, ForwardRule, StopRule
from engine.tree import TokenTree
from tests.drafters.tiny import GREEDY, assert_same_tree, call, drafter, llama, opening, prompt, trees
from tests.examples import examples

MODEL = llama()
DEPTH = 6
DRAFTER = drafter(MODEL, num_slots=4096)
NAMES = itertools.count()

rules = st.builds(
    EstimateRule,
    num_requests=st.integers(3, 6),
    base_s=st.sampled_from([0.5, 1.0, 4.0]),
    first_layer_s=st.sampled_from([0.05, 0.2]),
    layer_s=st.sampled_from([0.0, 0.03, 0.11, 0.4]),
    token_s=st.sampled_from([0.0, 0.011, 0.13]),
    mean_confidence=st.sampled_from([0.05, 0.3, 0.6, 0.9, 1.0]),
    tpot_s=st.sampled_from([None, 0.8, 1.3, 5.0]),
)


forward_rules = st.builds(
    ForwardRule,
    rate=st.sampled_from([0.3, 0.7, 1.0]),
    verify_tokens=st.sampled_from([0.0, 0.05, 0.2, 0.5]),
    row_tokens=st.sampled_from([0.0, 0.01, 0.1]),
    forward_tokens=st.sampled_from([0.0, 0.02, 0.1, 0.4]),
    exponent=st.sampled_from([0.4, 1.0, 1.0, 1.7]),
)


def drafted(
    plans: list[DraftPlan], rule: StopRule | None = None, sampling: SamplingParams = GREEDY
) -> list[TokenTree]:
    """Trees for the same prompts at every call, by their plans."""
    items = [
        opening(f"r{next(NAMES)}", prompt(50 + i, 9 + i), plan, sampling=sampling)
        for i, plan in enumerate(plans)
    ]
    names = [item.request_id for item in items]
    of = trees(DRAFTER.draft(DraftCall(call_id=1, items=items, stop_rule=rule)))
    DRAFTER.draft(call(release=names))
    return [of[name] for name in names]


@functools.cache
def deepest() -> list[TokenTree]:
    return drafted([DraftPlan(depth=DEPTH)] * 3)


def unstopped(limits: list[int]) -> list[TokenTree]:
    """What is drafted up to these limits without a rule: greedy chains begin as longer ones do."""
    return [
        tree.subset(np.arange(limit + 1, dtype=np.int32))
        for tree, limit in zip(deepest(), limits, strict=False)
    ]


def confidences(tree: TokenTree) -> list[float]:
    """Draft probabilities along a chain."""
    return np.exp(np.diff(tree.logp.astype(np.float64))).tolist()


def depth_by_algorithm_1(rule: EstimateRule, real: list[list[float]]) -> int:
    """Layers at which to stop, given the confidences of each chain to its limit; written from the listing.

    As drafters are asked, the first layer is drafted in any case.
    """
    acceptance_rates: list[list[float]] = [[1.0] for _ in real]  # arss, with AR_(i,0)
    deepest = max((len(chain) for chain in real), default=0)

    def throughput(of: list[list[float]], depth: int) -> float:
        tokens = rule.num_requests + sum(sum(chain[1:]) for chain in of)
        step_s = rule.base_s + rule.token_s * sum(len(chain) - 1 for chain in of)
        step_s += rule.first_layer_s * (depth > 0) + rule.layer_s * max(0, depth - 1)
        return BEYOND_OBJECTIVE if rule.tpot_s is not None and step_s > rule.tpot_s else tokens / step_s

    best = -math.inf
    for depth in range(1, deepest + 1):
        active = [len(chain) >= depth for chain in real]
        predicted = [
            [*rates, rates[-1] * rule.mean_confidence] if goes_on else rates
            for rates, goes_on in zip(acceptance_rates, active, strict=True)
        ]
        if depth > 1 and throughput(predicted, depth) <= best:
            return depth - 1
        for rates, chain, goes_on in zip(acceptance_rates, real, active, strict=True):
            if goes_on:
                rates.append(rates[-1] * chain[depth - 1])
        best = throughput(acceptance_rates, depth)
    return deepest


@examples(120)
@given(rules, st.lists(st.integers(0, DEPTH), min_size=1, max_size=3))
def test_the_batch_stops_where_the_rule_evaluated_outside_says(rule: EstimateRule, limits: list[int]) -> None:
    plans = [DraftPlan(depth=limit) for limit in limits]
    whole = unstopped(limits)
    depth = depth_by_algorithm_1(rule, [confidences(tree) for tree in whole])
    for tree, stopped, limit in zip(whole, drafted(plans, rule), limits, strict=True):
        assert stopped.depth.max() == min(depth, limit)
        assert_same_tree(stopped, tree.subset(np.arange(len(stopped), dtype=np.int32)))


@examples(120)
@given(forward_rules, st.lists(st.integers(0, DEPTH), min_size=1, max_size=3))
def test_a_layer_is_drafted_if_all_together_gain_more_than_its_forward_costs(
    rule: ForwardRule, limits: list[int]
) -> None:
    plans = [DraftPlan(depth=limit) for limit in limits]
    whole = unstopped(limits)
    depth = 1  # is drafted in any case
    while depth < DEPTH:
        paths = [math.exp(tree.logp[depth]) for tree in whole if tree.depth.max() > depth]
        children = np.array(paths) ** rule.exponent * rule.rate
        gained = float(np.maximum(children - rule.verify_tokens, 0.0).sum())
        if gained - rule.row_tokens * len(paths) <= rule.forward_tokens:
            break
        depth += 1
    for tree, stopped, limit in zip(whole, drafted(plans, rule), limits, strict=True):
        assert stopped.depth.max() == min(depth, limit)
        assert_same_tree(stopped, tree.subset(np.arange(len(stopped), dtype=np.int32)))


def test_a_forward_that_one_request_is_not_worth_pays_for_several() -> None:
    (alone,) = drafted([DraftPlan(depth=DEPTH)])
    worth = math.exp(alone.logp[1])
    rule = ForwardRule(rate=1.0, verify_tokens=0.0, row_tokens=0.0, forward_tokens=1.5 * worth)
    assert [len(tree) for tree in drafted([DraftPlan(depth=2)], rule)] == [2]
    many = [opening(f"r{next(NAMES)}", prompt(50, 9), DraftPlan(depth=2)) for _ in range(2)]
    of = trees(DRAFTER.draft(DraftCall(call_id=1, items=many, stop_rule=rule)))
    assert [len(tree) for tree in of.values()] == [3, 3]
    DRAFTER.draft(call(release=list(of)))


def test_an_objective_ends_drafting_before_it_is_missed() -> None:
    rule = EstimateRule(
        num_requests=2, base_s=1.0, first_layer_s=1e-9, layer_s=1e-9, token_s=0.0, mean_confidence=1.0
    )
    plans = [DraftPlan(depth=DEPTH)] * 2
    assert [len(tree) for tree in drafted(plans, rule)] == [DEPTH + 1] * 2
    strict = msgspec.structs.replace(rule, tpot_s=1.0 + 3.5e-9)
    assert [len(tree) for tree in drafted(plans, strict)] == [4, 4]


@examples(60)
@given(st.sampled_from([0.0, 0.05, 0.2, 0.4, 0.7, 0.999]), st.booleans())
def test_a_chain_ends_with_the_first_token_below_the_threshold(threshold: float, sampling: bool) -> None:
    """As Transformers' ConfidenceCriteria: the token that fell below is still part of the draft."""
    stop = math.log(threshold) if threshold else -math.inf
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=99) if sampling else GREEDY
    whole = drafted([DraftPlan(depth=DEPTH)] * 3, sampling=params)
    stopped = drafted([DraftPlan(depth=DEPTH, stop_token_logp=stop)] * 3, sampling=params)
    for tree, part in zip(whole, stopped, strict=True):
        below = [i for i, confidence in enumerate(confidences(tree), start=1) if confidence < threshold]
        assert len(part) - 1 == (below[0] if below else DEPTH)
        assert_same_tree(part, tree.subset(np.arange(len(part), dtype=np.int32)))


def test_in_a_beam_a_token_below_the_threshold_is_a_leaf() -> None:
    stop = math.log(0.1)
    (tree,) = drafted([DraftPlan(depth=4, width=4, stop_token_logp=stop)])
    own = tree.logp - tree.logp[tree.parent]
    leaves = np.flatnonzero((own < stop) & (tree.parent >= 0))
    assert len(leaves)
    assert not np.isin(leaves, tree.parent).any()
    assert tree.depth.max() > 1


@given(rules | forward_rules)
def test_a_call_brings_the_rule_it_was_sent_with(rule: StopRule) -> None:
    sent = DraftCall(call_id=1, items=[], stop_rule=rule)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=DraftCall).stop_rule == rule


def test_thresholds_survive_the_wire_and_calls_without_them_are_understood() -> None:
    plan = DraftPlan(depth=3, stop_token_logp=-0.5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=DraftPlan) == plan
    assert msgspec.msgpack.decode(msgspec.msgpack.encode({"depth": 3}), type=DraftPlan) == DraftPlan(depth=3)


def test_prompt_lookup_has_no_confidences_and_drafts_on() -> None:
    lookup = PromptLookupDrafter(vocab_size=50, max_tokens=500)
    rule = EstimateRule(
        num_requests=1, base_s=1.0, first_layer_s=9.0, layer_s=9.0, token_s=9.0, mean_confidence=0.0
    )
    plan = DraftPlan(depth=5, stop_token_logp=0.0)
    item = opening("a", [1, 2, 3, 4, 5, 6, 1, 2], plan)
    tree = trees(lookup.draft(DraftCall(call_id=1, items=[item], stop_rule=rule)))["a"]
    assert tree.token.tolist() == [2, 3, 4, 5, 6, 1]
