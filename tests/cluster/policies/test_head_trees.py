"""SmartSpec on decoding heads: the chosen k_1..k_h against enumeration, the trees against brute force."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import accumulate, product
from math import prod
from operator import mul
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import PolicyConfig
from cluster.policies import head_trees
from cluster.policies.base import DecodeRequest, Policy
from cluster.policies.goodput import StepTimes
from cluster.policies.head_trees import best_head_widths, full_trees, head_shapes
from cluster.policies.registry import make_policy
from drafters.heads_drafter import HeadsDrafter
from drafters.messages import DraftCall, DraftItem, DraftPlan
from engine.proposals import Proposals
from engine.sampling_params import RequestSpec, SamplingParams
from engine.tree import TokenTree
from tests.cluster.policies.batches import context, request
from tests.examples import examples

HEADS, MOST = 3, 3


def brute_force_goodput(
    rates: list[float], widths: tuple[int, ...], limits: list[int], times: StepTimes
) -> float:
    """Tokens per second, head by head as section 4.3 tells it."""
    tokens, depth, nodes = 0.0, 0, 0
    for limit in limits:
        tokens += 1.0
        reached, layer = 1.0, 1
        for head, width in enumerate(widths):
            if width == 0 or head >= limit:
                break
            reached *= 1.0 - (1.0 - rates[head]) ** width
            layer *= width
            tokens += reached
            nodes += layer
            depth = max(depth, head + 1)
    return tokens / float(times.roots_s[depth] + times.added_s[nodes])


@examples(80)
@given(
    st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]), min_size=HEADS, max_size=HEADS),
    st.lists(st.integers(0, HEADS), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    st.sampled_from([0.0, 0.1, 0.5]),
)
def test_the_widths_are_the_best_of_all(
    rates: list[float], limits: list[int], token_s: float, layer_s: float
) -> None:
    roots_s = 1.0 + np.array([0.0] + [0.05 + layer_s * k for k in range(1, HEADS + 1)])
    most_tokens = len(limits) * HEADS * MOST**HEADS
    times = StepTimes(roots_s=roots_s, added_s=token_s * np.arange(most_tokens + 1))
    found = best_head_widths(np.array(rates), np.array(limits), times, HEADS, MOST, MOST**HEADS)
    best = max(
        brute_force_goodput(rates, widths, limits, times) for widths in product(range(MOST + 1), repeat=HEADS)
    )
    assert brute_force_goodput(rates, tuple(found.tolist()), limits, times) == pytest.approx(best)


def test_shapes_end_with_the_first_unused_head_and_stay_within_the_beam() -> None:
    shapes = head_shapes(HEADS, MOST, 6)
    assert (np.cumprod(shapes, axis=1) <= 6).all()
    assert ((shapes[:, 1:] > 0) <= (shapes[:, :-1] > 0)).all()
    assert len(np.unique(shapes, axis=0)) == len(shapes)
    assert not shapes[0].any()


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 40))
def test_shapes_are_those_of_enumeration_in_its_order(num_heads: int, most: int, most_in_layer: int) -> None:
    ended = [
        (*widths, *(0,) * (num_heads - depth))
        for depth in range(num_heads + 1)
        for widths in product(range(1, most + 1), repeat=depth)
        if prod(widths) <= most_in_layer
    ]
    expected = sorted(ended, key=lambda shape: sum(accumulate(shape, mul)))
    assert head_shapes(num_heads, most, most_in_layer).tolist() == [list(shape) for shape in expected]


def test_only_shapes_within_the_beam_are_looked_at() -> None:
    """Five heads of width 16 have a million shapes. Operations are counted: time depends on the machine."""
    most_operations, done = 100_000, 0

    def count(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal done
        if frame.f_code.co_filename != head_trees.__file__:
            return None
        frame.f_trace_opcodes = True
        done += event == "opcode"
        if done > most_operations:
            raise AssertionError(f"more than {most_operations} operations")
        return count

    head_shapes.cache_clear()
    before = sys.gettrace()
    sys.settrace(count)
    try:
        shapes = head_shapes(5, 16, 16)
    finally:
        sys.settrace(before)
    assert done > len(shapes) > 500


def drafted(request_id: str, plan: DraftPlan) -> TokenTree:
    """A tree by the heads drafter on flat proposals, of which every beam keeps the first choices."""
    proposals = Proposals(
        position=2,
        token=np.arange(HEADS * 4, dtype=np.int32).reshape(HEADS, 4),
        logp=np.tile(-np.arange(1, 5, dtype=np.float32), (HEADS, 1)),
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=50)
    item = DraftItem(
        request_id=request_id,
        start=0,
        tokens=np.zeros(0, np.int32),
        plan=plan,
        spec=RequestSpec(request_id=request_id, tokens=[1, 2], prompt_len=2, sampling=sampling),
        proposals=proposals,
    )
    drafter = HeadsDrafter(num_heads=HEADS, vocab_size=100, max_tokens=64)
    return drafter.draft(DraftCall(call_id=1, items=[item])).drafts[0].tree


def test_a_full_tree_has_every_combination() -> None:
    tree = drafted("r", DraftPlan(depth=3, width=16))
    (nodes,) = full_trees([tree], [np.array([2, 2, 1])])
    chosen = tree.subset(nodes)
    chosen.validate()
    assert np.bincount(chosen.depth).tolist() == [1, 2, 4, 4]


def heads_request(name: str, **changes: object) -> DecodeRequest:
    return request(name, **({"num_heads": HEADS, "max_draft": HEADS, "max_width": 16} | changes))


def policy(**options: Any) -> Policy:
    return make_policy(PolicyConfig(name="smartspec", max_width=MOST, **options))


def test_cheap_verification_asks_for_wide_trees_and_dear_verification_for_none() -> None:
    smartspec = policy()
    batch = [heads_request("a", rate=0.5), heads_request("b", rate=0.6, max_draft=2)]
    cheap = context(token_s=1e-6, draft_s=1e-5)
    plans = smartspec.plan(batch, cheap)
    assert [plan.depth for plan in plans] == [3, 2]
    assert plans[0].width > 1
    trees = [drafted(one.request_id, plan) for one, plan in zip(batch, plans, strict=True)]
    selected = smartspec.select(batch, trees, cheap)
    assert all(len(nodes) > 4 for nodes in selected)
    dear = context(token_s=1.0)
    assert [plan.depth for plan in smartspec.plan(batch, dear)] == [0, 0]


def test_heads_and_chains_share_a_batch() -> None:
    smartspec = policy()
    batch = [request("chain", rate=0.8), heads_request("heads", drafter="large", rate=0.6)]
    cheap = context(token_s=1e-6, draft_s=1e-5)
    chain, heads = smartspec.plan(batch, cheap)
    assert (chain.width, chain.depth > 0) == (1, True)
    assert heads.width > 1
    trees = [TokenTree.chain(1, [2, 3, 4], [-0.1] * 3), drafted("heads", heads)]
    nodes, _ = smartspec.select(batch, trees, cheap)
    assert nodes.tolist() == [0, 1, 2, 3]
