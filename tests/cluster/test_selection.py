"""Selection against brute force over every connected subset of small trees."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import selection
from cluster.forest import Forest
from cluster.selection import ROUNDING, marginal_goodput, slo_customized, throughput_optimized
from engine.tree import TokenTree
from tests.cluster.both_ways import both_ways
from tests.examples import examples

# Coarse steps make ties likely; probability 1 makes parent and child equal.
LOGPS = tuple(np.log([1.0, 0.9, 0.5, 0.25]).tolist())
few_nodes = both_ways(selection, "FEW_NODES", selection.FEW_NODES)


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 5) -> TokenTree:
    n = draw(st.integers(0, max_nodes))
    parent, logp, depth = [-1], [0.0], [0]
    for node in range(1, n + 1):
        # Both at once: it is by the number of draws that Hypothesis is slow.
        above, step = divmod(draw(st.integers(0, node * len(LOGPS) - 1)), len(LOGPS))
        parent.append(above)
        logp.append(logp[above] + LOGPS[step])
        depth.append(depth[above] + 1)
    return TokenTree.of(range(n + 1), parent, logp, depth)


def connected_subsets(forest: Forest) -> list[np.ndarray]:
    drafted = np.flatnonzero(forest.parent >= 0).tolist()
    found = []
    for nodes in chain.from_iterable(combinations(drafted, k) for k in range(len(drafted) + 1)):
        chosen = np.zeros(forest.num_nodes, dtype=np.bool_)
        chosen[forest.roots] = True
        chosen[list(nodes)] = True
        if all(chosen[forest.parent[node]] for node in nodes):
            found.append(chosen)
    return found


def assert_connected(forest: Forest, chosen: np.ndarray) -> None:
    assert chosen[forest.roots].all()
    drafted = np.flatnonzero(chosen & (forest.parent >= 0))
    assert chosen[forest.parent[drafted]].all()


@examples(100)
@given(st.lists(trees(), min_size=1, max_size=3), st.data())
def test_both_phases_are_optimal_connected_and_within_budget(
    batch: list[TokenTree], data: st.DataObject
) -> None:
    """AdaServe Algorithm 1: with enough budget, every requirement is met and the rest is maximal."""
    forest = Forest.of(batch)
    f = forest.path_product(forest.conditional)
    n = forest.num_requests
    budget = n + data.draw(st.integers(0, 8))
    required = np.array(data.draw(st.lists(st.floats(0.0, 3.0), min_size=n, max_size=n)))
    first = slo_customized(forest, f, required, max_nodes=99, budget=budget)
    both = throughput_optimized(first, f, budget)
    assert_connected(forest, first)
    assert_connected(forest, both)
    assert first.sum() <= budget
    assert both.sum() == min(budget, forest.num_nodes)

    def expected(chosen: np.ndarray) -> np.ndarray:
        return np.bincount(forest.request[chosen], weights=f[chosen], minlength=n)

    reachable = np.minimum(required, expected(np.ones(forest.num_nodes, dtype=np.bool_)))
    feasible = [
        subset
        for subset in connected_subsets(forest)
        if subset.sum() <= budget and (expected(subset) >= reachable - ROUNDING).all()
    ]
    if feasible:
        assert (expected(first) >= reachable - 1e-9).all()
        best = max(f[subset].sum() for subset in feasible)
        assert f[both].sum() == pytest.approx(best)
        fewest = min(subset.sum() for subset in feasible)
        assert first.sum() == fewest


@examples(100)
@given(st.lists(trees(), min_size=1, max_size=3), st.floats(0.5, 20.0), st.floats(0.01, 2.0))
def test_marginal_goodput_equals_enumeration(batch: list[TokenTree], base_s: float, token_s: float) -> None:
    forest = Forest.of(batch)
    f = forest.path_product(forest.conditional)
    roots = np.zeros(forest.num_nodes, dtype=np.bool_)
    roots[forest.roots] = True
    chosen = marginal_goodput(roots, f, base_s, token_s)
    assert_connected(forest, chosen)

    def goodput(subset: np.ndarray) -> float:
        extra = int(subset.sum()) - forest.num_requests
        return float(f[subset].sum()) / (base_s + token_s * extra)

    assert goodput(chosen) == pytest.approx(max(goodput(subset) for subset in connected_subsets(forest)))


@examples(100)
@given(
    st.lists(trees(), min_size=1, max_size=3),
    st.floats(0.5, 20.0),
    st.sampled_from([0.0, 0.01, 0.3]),
    st.floats(0.01, 2.0),
    st.integers(0, 8),
    st.sampled_from([1.0, 0.8, 0.5]),
)
def test_marginal_goodput_sees_the_knee_and_what_experts_share(
    batch: list[TokenTree], base_s: float, before_s: float, past_s: float, knee: int, falling: float
) -> None:
    forest = Forest.of(batch)
    f = forest.path_product(forest.conditional)
    roots = np.zeros(forest.num_nodes, dtype=np.bool_)
    roots[forest.roots] = True
    order = np.arange(forest.num_nodes - forest.num_requests)
    costs = before_s + np.where(order < knee, 0.0, past_s) + (1.0 - falling) * base_s * falling**order
    chosen = marginal_goodput(roots, f, base_s, costs)
    assert_connected(forest, chosen)

    def goodput(subset: np.ndarray) -> float:
        extra = int(subset.sum()) - forest.num_requests
        return float(f[subset].sum()) / (base_s + float(costs[:extra].sum()))

    assert goodput(chosen) == pytest.approx(max(goodput(subset) for subset in connected_subsets(forest)))


def in_turn(
    forest: Forest, f: np.ndarray, required: np.ndarray, max_nodes: int, budget: int, urgency: np.ndarray
) -> np.ndarray:
    """AdaServe step 2 as the paper words it: one request after the other, one node after the other."""
    chosen = np.zeros(forest.num_nodes, dtype=np.bool_)
    chosen[forest.roots] = True
    left = budget - forest.num_requests
    for request in sorted(range(forest.num_requests), key=lambda r: (-urgency[r], r)):
        expected, taken = 1.0, 0
        nodes = range(forest.offsets[request] + 1, forest.offsets[request + 1])
        for node in sorted(nodes, key=lambda node: (-f[node], node)):
            if left <= 0 or taken >= max_nodes or expected >= required[request] - 1e-12:
                break
            chosen[node] = True
            expected, taken, left = expected + f[node], taken + 1, left - 1
    return chosen


@examples(100)
@given(st.lists(trees(9), min_size=1, max_size=6), st.integers(0, 12), st.integers(0, 40), st.data())
def test_both_phases_choose_the_very_nodes_that_going_one_by_one_chooses(
    batch: list[TokenTree], max_nodes: int, budget: int, data: st.DataObject
) -> None:
    """Also among ties, for trees of different sizes, and when the budget ends within a request."""
    forest = Forest.of(batch)
    f = forest.path_product(forest.conditional)
    n = forest.num_requests
    needs = st.sampled_from([-2.0, 1.0, 1.5, 2.0, 3.5, 30.0])
    required = np.array(data.draw(st.lists(needs, min_size=n, max_size=n)))
    first = slo_customized(forest, f, required, max_nodes, budget)
    np.testing.assert_array_equal(first, in_turn(forest, f, required, max_nodes, budget, required))
    both = throughput_optimized(first, f, budget)
    rest = sorted(np.flatnonzero(~first).tolist(), key=lambda node: (-f[node], node))
    added = rest[: max(0, budget - int(first.sum()))]
    assert np.flatnonzero(both & ~first).tolist() == sorted(added)


@examples(100)
@given(st.lists(trees(9), min_size=1, max_size=6), st.integers(0, 12), st.integers(0, 40), st.data())
def test_urgency_beyond_what_a_tree_can_yield_counts_for_the_order_alone(
    batch: list[TokenTree], max_nodes: int, budget: int, data: st.DataObject
) -> None:
    """AdaServe Algorithm 2: sorted by A(r), served up to A_cap(r)."""
    forest = Forest.of(batch)
    f = forest.path_product(forest.conditional)
    n = forest.num_requests
    needs = st.sampled_from([-2.0, 1.0, 1.5, 2.0, 3.5, 30.0, 31.0])
    urgency = np.array(data.draw(st.lists(needs, min_size=n, max_size=n)))
    required = np.minimum(urgency, forest.depths + 1.0)
    chosen = slo_customized(forest, f, required, max_nodes, budget, urgency)
    np.testing.assert_array_equal(chosen, in_turn(forest, f, required, max_nodes, budget, urgency))


def test_the_most_urgent_request_is_served_first_when_the_budget_is_short() -> None:
    tree = TokenTree.chain(0, [1, 2, 3], [-0.1, -0.1, -0.1])
    forest = Forest.of([tree, tree])
    f = forest.path_product(forest.conditional)
    chosen = slo_customized(forest, f, np.array([1.5, 3.0]), max_nodes=8, budget=4)
    assert [len(nodes) for nodes in forest.chosen_nodes(chosen)] == [1, 3]


def test_no_request_takes_more_than_its_share_in_the_slo_phase() -> None:
    tree = TokenTree.chain(0, [1, 2, 3], [-0.1, -0.1, -0.1])
    forest = Forest.of([tree, tree])
    f = forest.path_product(forest.conditional)
    chosen = slo_customized(forest, f, np.array([4.0, 4.0]), max_nodes=2, budget=20)
    assert [len(nodes) for nodes in forest.chosen_nodes(chosen)] == [3, 3]


@given(st.lists(trees(8), min_size=1, max_size=4))
def test_path_products_are_the_trees_own_probabilities(batch: list[TokenTree]) -> None:
    forest = Forest.of(batch)
    logp = np.concatenate([tree.logp for tree in batch])
    np.testing.assert_allclose(forest.path_product(forest.conditional), np.exp(logp), rtol=1e-5)
