"""Trees over the heads' proposals against brute force, and what the drafter says of its own record."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.heads_drafter import HeadsDrafter
from drafters.messages import DraftCall, DraftItem, DraftPlan, DraftResult
from engine.proposals import Proposals
from engine.sampling_params import RequestSpec, SamplingParams
from engine.stop_rules import EstimateRule
from engine.tree import TokenTree
from engine.wire import Decoder, encode
from tests.examples import examples

HEADS, CANDIDATES, VOCAB = 3, 4, 100
PROMPT = [1, 2, 3]


def drafter() -> HeadsDrafter:
    return HeadsDrafter(num_heads=HEADS, vocab_size=VOCAB, max_tokens=64, num_candidates=CANDIDATES)


def proposals(position: int, seed: int = 0) -> Proposals:
    rng = np.random.default_rng(seed)
    return Proposals(
        position=position,
        token=np.stack([rng.permutation(VOCAB)[:CANDIDATES] for _ in range(HEADS)]).astype(np.int32),
        logp=-np.sort(rng.exponential(size=(HEADS, CANDIDATES))).astype(np.float32),
        seconds=0.25,
    )


def opening(plan: DraftPlan, proposed: Proposals | None, **sampling: object) -> DraftItem:
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 50} | sampling))  # type: ignore[arg-type]
    spec = RequestSpec(request_id="r", tokens=list(PROMPT), prompt_len=len(PROMPT), sampling=params)
    empty = np.zeros(0, np.int32)
    return DraftItem(request_id="r", start=0, tokens=empty, plan=plan, spec=spec, proposals=proposed)


def following(start: int, tokens: list[int], plan: DraftPlan, proposed: Proposals | None) -> DraftItem:
    new = np.array(tokens, np.int32)
    return DraftItem(request_id="r", start=start, tokens=new, plan=plan, proposals=proposed)


def call(item: DraftItem, stop_rule: EstimateRule | None = None) -> DraftCall:
    return DraftCall(call_id=1, items=[item], stop_rule=stop_rule)


def tree_of(result: DraftResult) -> TokenTree:
    (draft,) = result.drafts
    draft.tree.validate()
    return draft.tree


def paths(tree: TokenTree, depth: int) -> dict[tuple[int, ...], float]:
    """Tokens from the root down to each node of a layer, and its log-probability."""
    nodes = np.flatnonzero(tree.depth == depth).tolist()
    return {tuple(tree.token[tree.path(node)[1:]].tolist()): float(tree.logp[node]) for node in nodes}


@examples(60)
@given(st.integers(0, 1000), st.integers(0, 5), st.integers(1, 16))
def test_a_tree_is_the_best_of_the_cartesian_product_layer_by_layer(
    seed: int, depth: int, width: int
) -> None:
    proposed = proposals(len(PROMPT), seed)
    tree = tree_of(drafter().draft(call(opening(DraftPlan(depth=depth, width=width), proposed))))
    assert int(tree.depth.max()) == min(depth, HEADS)
    kept: list[tuple[int, ...]] = [()]
    for layer in range(min(depth, HEADS)):
        scores = {}
        for above, choice in product(kept, range(CANDIDATES)):
            path = (*above, choice)
            scores[path] = sum(float(proposed.logp[head, c]) for head, c in enumerate(path))
        kept = sorted(scores, key=lambda path: -scores[path])[:width]
        expected = {
            tuple(int(proposed.token[head, c]) for head, c in enumerate(path)): scores[path] for path in kept
        }
        found = paths(tree, layer + 1)
        assert found.keys() == expected.keys()
        assert all(found[path] == pytest.approx(expected[path], abs=1e-4) for path in found)


def test_without_proposals_for_this_very_position_only_the_root_is_drafted() -> None:
    plan = DraftPlan(depth=3, width=2)
    for proposed in (None, proposals(len(PROMPT) - 1), proposals(len(PROMPT) + 1)):
        assert len(tree_of(drafter().draft(call(opening(plan, proposed))))) == 1


def test_stop_tokens_are_leaves_and_the_request_s_end_bounds_the_depth() -> None:
    proposed = proposals(len(PROMPT))
    best = int(proposed.token[0, 0])
    chain = DraftPlan(depth=3, width=1)
    assert len(tree_of(drafter().draft(call(opening(chain, proposed, stop_token_ids=(best,)))))) == 2
    assert len(tree_of(drafter().draft(call(opening(chain, proposed, max_tokens=2))))) == 2
    assert len(tree_of(drafter().draft(call(opening(chain, proposed, max_tokens=1))))) == 1


def test_a_chain_of_first_choices_is_scored_up_to_its_first_error() -> None:
    plan = DraftPlan(depth=2, width=1)
    for right, new, scored, agreed in ((0, 1, 1, 0), (1, 1, 1, 1), (1, 2, 2, 1), (2, 2, 2, 2), (3, 4, 3, 3)):
        one = drafter()
        proposed = proposals(len(PROMPT))
        first = one.draft(call(opening(plan, proposed))).drafts[0]
        assert (first.num_scored, first.num_agreed) == (0, 0)
        choices = proposed.token[:, 0].tolist()
        tokens = [*choices[:right], *[VOCAB - 1 if c != VOCAB - 1 else 0 for c in [*choices, 7][right:new]]]
        draft = one.draft(call(following(len(PROMPT), tokens, plan, None))).drafts[0]
        assert (draft.num_scored, draft.num_agreed) == (scored, agreed)
        # Nothing was proposed since, so nothing is scored again.
        again = one.draft(call(following(len(PROMPT) + new, [5], plan, None))).drafts[0]
        assert (again.num_scored, again.num_agreed) == (0, 0)


def test_evaluating_the_heads_counts_as_the_drafter_s_time() -> None:
    result = drafter().draft(call(opening(DraftPlan(depth=1), proposals(len(PROMPT)))))
    assert result.seconds > result.forward_seconds == 0.25


def test_a_stop_rule_ends_the_tree_where_another_layer_does_not_pay() -> None:
    proposed = proposals(len(PROMPT))
    rule = EstimateRule(
        num_requests=1, base_s=1.0, first_layer_s=0.1, layer_s=50.0, token_s=0.0, mean_confidence=0.5
    )
    tree = tree_of(drafter().draft(call(opening(DraftPlan(depth=3, width=2), proposed), rule)))
    assert int(tree.depth.max()) == 1


def test_an_unknown_request_is_reported_and_items_survive_the_wire() -> None:
    item = following(5, [4], DraftPlan(depth=2), proposals(6))
    sent = Decoder[DraftCall](DraftCall).decode(encode(call(item)))
    np.testing.assert_array_equal(sent.items[0].proposals.token, item.proposals.token)  # type: ignore[union-attr]
    result = drafter().draft(sent)
    assert result.unknown == ["r"]
    assert not result.drafts


def beam_of(position: int) -> Proposals:
    """Two layers of three: 10 (children 20, 21), 11 (child 22), 12 (none)."""
    return Proposals(
        position=position,
        token=np.array([[10, 11, 12], [20, 22, 21]], np.int32),
        logp=np.array([[-0.4, -1.2, -3.0], [-0.5, -0.1, -2.0]], np.float32),
        parent=np.array([[0, 0, 0], [0, 1, 0]], np.int32),
    )


def of_beams() -> HeadsDrafter:
    return HeadsDrafter(
        num_heads=5, vocab_size=VOCAB, max_tokens=64, num_candidates=3, max_width=3, kind="eagle"
    )


def test_of_a_beam_the_plan_takes_its_width_with_the_parents_as_proposed() -> None:
    proposed = beam_of(len(PROMPT))
    whole = tree_of(of_beams().draft(call(opening(DraftPlan(depth=4, width=3), proposed))))
    assert paths(whole, 1) == pytest.approx({(10,): -0.4, (11,): -1.2, (12,): -3.0})
    assert paths(whole, 2) == pytest.approx({(10, 20): -0.9, (11, 22): -1.3, (10, 21): -2.4})
    chain = tree_of(of_beams().draft(call(opening(DraftPlan(depth=4, width=1), proposed))))
    assert paths(chain, 2) == pytest.approx({(10, 20): -0.9})
    stopped = tree_of(
        of_beams().draft(call(opening(DraftPlan(depth=4, width=2), proposed, stop_token_ids=(10,))))
    )
    assert paths(stopped, 2) == pytest.approx({(11, 22): -1.3})
    assert not of_beams().capabilities.has_independent_layers


@pytest.mark.parametrize(
    ("tokens", "scored", "agreed"),
    [
        ([10, 20], 2, 2),
        ([10, 21, 5], 2, 1),
        ([11, 22], 2, 1),
        ([12, 22], 1, 0),
        ([13, 20], 1, 0),
        ([10], 1, 1),
    ],
)
def test_the_first_choice_after_each_token_of_a_beam_is_scored(
    tokens: list[int], scored: int, agreed: int
) -> None:
    one, plan = of_beams(), DraftPlan(depth=2, width=3)
    one.draft(call(opening(plan, beam_of(len(PROMPT)))))
    draft = one.draft(call(following(len(PROMPT), tokens, plan, None))).drafts[0]
    assert (draft.num_scored, draft.num_agreed) == (scored, agreed)


def test_tokens_that_are_ruled_out_do_not_hide_what_follows_the_same_token() -> None:
    """Where fewer are left than were asked for, a CPU's best tokens go on with token 0, at minus infinity."""
    out = -np.inf
    proposed = Proposals(
        position=3,
        token=np.array([[0, 0, 0], [7, 0, 0]], np.int32),
        parent=np.zeros((2, 3), np.int32),
        logp=np.array([[-0.1, out, out], [-0.2, out, out]], np.float32),
    )
    eagle = HeadsDrafter(num_heads=2, vocab_size=VOCAB, max_tokens=64, num_candidates=3, kind="eagle")
    tree = tree_of(eagle.draft(call(opening(DraftPlan(depth=2, width=3), proposed))))
    assert tree.token.tolist() == [3, 0, 7]
