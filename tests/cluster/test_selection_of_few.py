"""What is selected in plain numbers is what is selected in arrays."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.calibration import Calibration
from cluster.config import PolicyConfig
from cluster.forest import Forest
from cluster.phase_trace import tracing
from cluster.policies import flotilla
from cluster.policies.base import DecodeRequest, StepContext
from cluster.policies.flotilla import Flotilla
from cluster.selection_of_few import by_tree
from engine.tree import TokenTree
from tests.cluster.policies.batches import candidate_trees, contexts, requests
from tests.examples import examples

NAMES = ("small", "large", "")


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[DecodeRequest], list[TokenTree]]:
    batch = draw(st.lists(requests(), min_size=1, max_size=4))
    return batch, [draw(candidate_trees()) for _ in batch]


def learnt(seed: int) -> Calibration:
    """A calibration that saw trees of which some nodes were accepted."""
    rng, found = np.random.default_rng(seed), Calibration()
    for name in NAMES:
        depth = 4
        logps = np.log(rng.uniform(0.05, 1.0, depth))
        forest = Forest.of([TokenTree.chain(1, [2] * depth, logps.tolist()) for _ in range(8)])
        on_path = forest.depth <= rng.integers(0, depth + 1, 8).repeat(depth + 1)
        found.observe(forest, [name] * 8, on_path)
    return found


@examples(200)
@given(st.lists(candidate_trees(), min_size=1, max_size=5), st.data())
def test_chances_are_those_of_arrays(trees: list[TokenTree], data: st.DataObject) -> None:
    drafters = [data.draw(st.sampled_from(NAMES)) for _ in trees]
    calibration = learnt(data.draw(st.integers(0, 5)))
    found = calibration.path_probabilities_of_few(trees, drafters)
    assert found == pytest.approx(calibration.path_probabilities(Forest.of(trees), drafters), rel=1e-12)


@examples(300)
@given(steps(), contexts(), st.sampled_from([1, 3, 8]), st.sampled_from([None, 3, 6, 40]))
def test_the_same_nodes_are_selected_and_the_same_learnt(
    step: tuple[list[DecodeRequest], list[TokenTree]],
    context: StepContext,
    max_nodes: int,
    verify_budget: int | None,
) -> None:
    batch, trees = step
    config = PolicyConfig(max_nodes=max_nodes, verify_budget=verify_budget)
    few, many = Flotilla(config), Flotilla(config)
    assert sum(map(len, trees)) <= flotilla.FEW_NODES
    for _ in range(2):  # the second step goes by what the first one took
        found = few.select(batch, trees, context)
        with tracing() as trace:  # which takes arrays
            expected = many.select(batch, trees, context)
        assert len(trace.phases) == 2
        assert [nodes.tolist() for nodes in found] == [nodes.tolist() for nodes in expected]
        assert all(nodes.dtype == np.int32 for nodes in found)
        assert few._unseen_s == pytest.approx(many._unseen_s)
        assert few._predicted_s == pytest.approx(many._predicted_s)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.data())
def test_nodes_go_back_to_their_trees(sizes: list[int], data: st.DataObject) -> None:
    offsets = [0, *np.cumsum(sizes).tolist()]
    chosen = data.draw(st.sets(st.integers(0, offsets[-1] - 1)))
    found = by_tree(offsets, chosen)
    assert [nodes.tolist() for nodes in found] == [
        sorted(node - start for node in chosen & set(range(start, end))) for start, end in pairwise(offsets)
    ]
