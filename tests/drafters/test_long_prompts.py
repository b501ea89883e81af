"""Drafters without a model take long prompts in piece by piece: nobody waits, and nothing else differs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters import modelless
from drafters.messages import DraftPlan
from drafters.prompt_lookup import PromptLookupDrafter
from drafters.suffix_drafter import SuffixAutomatonDrafter
from tests.drafters.tiny import assert_same_tree, call, following, opening, trees
from tests.examples import examples

Modelless = PromptLookupDrafter | SuffixAutomatonDrafter
KINDS = ("prompt_lookup", "suffix_automaton")
PLAN = DraftPlan(3, 2)


def make(kind: str) -> Modelless:
    if kind == "prompt_lookup":
        return PromptLookupDrafter(vocab_size=10, max_tokens=100_000)
    return SuffixAutomatonDrafter(vocab_size=10, max_tokens=100_000, scope="request")


def text(seed: int, length: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 4, length).tolist()
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_others_do_not_wait_for_long_prompts(kind: str) -> None:
    drafter, long, short = make(kind), text(1, 5000), text(2, 40)
    drafter.draft(call(opening("short", short, PLAN)))
    items = [opening("a", long, PLAN), opening("b", long, PLAN), following("short", 40, [1, 2], PLAN)]
    got = trees(drafter.draft(call(*items)))
    assert sum(len(drafter._held[name].tokens) for name in "ab") == modelless.MOST_READ
    assert (got["a"].num_drafted, got["a"].token[0]) == (0, long[-1])
    assert got["short"].num_drafted
    drafter.draft_ahead()
    assert sum(len(drafter._held[name].tokens) for name in "ab") == modelless.MOST_READ + modelless.PIECE
    while drafter.draft_ahead():
        pass
    got = trees(drafter.draft(call(*(following(name, 5000, [0], PLAN) for name in "ab"))))
    assert got["a"].num_drafted
    assert got["b"].num_drafted
    drafter.draft(call(release=["a", "b", "short"]))
    assert not drafter._unread


@pytest.mark.parametrize("kind", KINDS)
@examples(60)
@given(seed=st.integers(0, 2**32 - 1))
def test_drafts_and_scores_are_those_of_reading_at_once(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(modelless, "MOST_READ", 7)
        patched.setattr(modelless, "PIECE", 3)
        drafter, at_once = make(kind), make(kind)
        patched.setattr(at_once, "reads_in_pieces", False)
        tokens = text(seed, int(rng.integers(1, 60)))
        prompt_len, heard = int(rng.integers(1, len(tokens) + 1)), 0
        scores, expected_scores = np.zeros(2, dtype=int), np.zeros(2, dtype=int)
        for step in range(12):
            plan = DraftPlan(0 if step == 11 else int(rng.integers(0, 4)), 2)
            item = following("a", heard, tokens[heard:], plan)
            if step == 0:
                item = opening("a", tokens, plan, prompt_len=prompt_len)
            heard = len(tokens)
            [got], [expected] = drafter.draft(call(item)).drafts, at_once.draft(call(item)).drafts
            if drafter._unread:
                assert (got.tree.num_drafted, got.tree.token[0]) == (0, tokens[-1])
            else:
                assert_same_tree(got.tree, expected.tree)
            scores += (got.num_scored, got.num_agreed)
            expected_scores += (expected.num_scored, expected.num_agreed)
            for _ in range(rng.integers(0, 3)):
                drafter.draft_ahead()
            tokens += text(int(rng.integers(2**32)), int(rng.integers(1, 4)))
        assert scores.tolist() == expected_scores.tolist()
        assert not drafter._unread


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefetch_is_done_with_its_call_and_a_gap_is_noticed(kind: str) -> None:
    drafter, tokens = make(kind), text(3, 5000)
    [draft] = drafter.draft(call(opening("a", tokens, DraftPlan(0), prompt_len=100))).drafts
    assert draft.num_scored == 4900
    drafter.draft(call(opening("b", tokens, PLAN)))
    assert drafter.draft(call(following("b", 5001, [1], PLAN))).unknown == ["b"]
    again = drafter.draft(call(opening("b", [*tokens, 1], DraftPlan(0)), release=["b"]))
    same = make(kind).draft(call(opening("b", [*tokens, 1], DraftPlan(0))))
    assert_same_tree(trees(again)["b"], trees(same)["b"])
