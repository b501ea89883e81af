"""A chain taken from what was proposed is what a beam one wide takes of it."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drafters.messages import DraftPlan
from engine.proposals import Proposals
from engine.proposed_growth import BeamGrowth, ChainGrowth, Layers, grown, growth
from engine.tree import TokenTree
from tests.examples import examples


def assert_same(ours: TokenTree, theirs: TokenTree) -> None:
    """Node by node, and of the same types."""
    for name in ("token", "parent", "logp", "depth"):
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist()
        assert getattr(ours, name).dtype == getattr(theirs, name).dtype


BOUNDS = st.sampled_from([-math.inf, -3.0, -1.0, -0.25])


@st.composite
def proposed(draw: st.DrawFn) -> Proposals:
    """Layers of heads or of a beam; few tokens, so that some repeat, some are ruled out or no numbers."""
    depth, width = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    logps = st.sampled_from([math.nan, -math.inf, -2.0, -1.0, -0.5, -0.125, -0.0])
    logp = np.array(draw(st.lists(logps, min_size=depth * width, max_size=depth * width)), dtype=np.float32)
    token = draw(st.lists(st.integers(0, 5), min_size=depth * width, max_size=depth * width))
    parent = draw(st.lists(st.integers(0, width - 1), min_size=depth * width, max_size=depth * width))
    is_beam = draw(st.booleans())
    # Candidates of a parent come best first.
    logp = -np.sort(-logp.reshape(depth, width), axis=1)
    return Proposals(
        position=3,
        token=np.array(token, dtype=np.int32).reshape(depth, width),
        logp=logp,
        parent=np.array(parent, dtype=np.int32).reshape(depth, width) if is_beam else None,
    )


@given(proposed(), st.integers(1, 8), BOUNDS, BOUNDS, st.frozensets(st.integers(0, 5), max_size=2))
@examples(400)
def test_a_chain_is_a_beam_one_wide(
    proposals: Proposals, depth: int, stop: float, stop_token: float, stops: frozenset[int]
) -> None:
    plan = DraftPlan(depth=depth, width=1, stop_logp=stop, stop_token_logp=stop_token)
    layers = Layers(proposals)
    chain = growth(7, plan, stops, layers)
    beam = BeamGrowth(7, plan, stops, layers)
    assert isinstance(chain, ChainGrowth)
    while True:
        ours, theirs = chain.tree(), beam.tree()
        assert_same(ours, theirs)
        grew = chain.grow()
        assert grew == beam.grow()
        if not grew:
            return
        assert chain.last_acceptance() == beam.last_acceptance()
        assert chain.open_acceptance() == beam.open_acceptance()


@given(
    proposed(),
    st.integers(0, 8),
    st.integers(1, 3),
    BOUNDS,
    BOUNDS,
    st.frozensets(st.integers(0, 5), max_size=2),
)
@examples(400)
def test_the_whole_tree_is_what_grows_layer_by_layer(
    proposals: Proposals, depth: int, width: int, stop: float, stop_token: float, stops: frozenset[int]
) -> None:
    plan = DraftPlan(depth=depth, width=width, stop_logp=stop, stop_token_logp=stop_token)
    growing = BeamGrowth(7, plan, stops, Layers(proposals))
    while growing.grow():
        pass
    assert_same(grown(7, plan, stops, proposals), growing.tree())


def test_what_is_no_number_is_not_drafted() -> None:
    overflowed = Proposals(
        position=3, token=np.zeros((2, 1), dtype=np.int32), logp=np.full((2, 1), math.nan, dtype=np.float32)
    )
    for width in (1, 2):
        plan = DraftPlan(depth=2, width=width)
        assert len(grown(7, plan, frozenset(), overflowed)) == 1
        assert not growth(7, plan, frozenset(), Layers(overflowed)).grow()


def test_a_chain_deeper_than_usual() -> None:
    depth = 80
    layers = Layers(
        Proposals(
            position=1,
            token=np.arange(depth, dtype=np.int32)[:, None],
            logp=np.full((depth, 1), -0.01, dtype=np.float32),
        )
    )
    chain = growth(1, DraftPlan(depth=depth), frozenset(), layers)
    while chain.grow():
        pass
    tree = chain.tree()
    tree.validate()
    assert tree.num_drafted == depth
