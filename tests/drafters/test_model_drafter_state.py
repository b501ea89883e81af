"""What a model drafter keeps between calls: KV of drafted paths, slots, scores, and what it forgets."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters import draft_ahead, model_drafter
from drafters.messages import DraftPlan
from drafters.model_drafter import ModelDrafter
from engine.sampling_params import SamplingParams
from engine.tree import TokenTree
from tests.drafters.tiny import (
    GREEDY,
    VOCAB,
    assert_same_tree,
    call,
    drafter,
    following,
    llama,
    log_probs,
    opening,
    prompt,
    trees,
)
from tests.examples import examples

MODEL = llama()
PLAN = DraftPlan(depth=3, width=2)


def random_commit(rng: np.random.Generator, tree: TokenTree) -> list[int]:
    """What a verifier may return: some path of the tree, then a token of its own (perhaps in the tree)."""
    node, tokens = 0, []
    while len(children := tree.children(node)) and rng.random() < 0.7:
        node = int(rng.choice(children))
        tokens.append(int(tree.token[node]))
    children = tree.children(node)
    if len(children) and rng.random() < 0.3:
        return [*tokens, int(tree.token[rng.choice(children)])]
    return [*tokens, int(rng.integers(VOCAB))]


@examples(10)
@given(seed=st.integers(0, 2**32 - 1), sampled=st.booleans())
def test_reusing_what_was_computed_equals_recomputing_it(seed: int, sampled: bool) -> None:
    rng = np.random.default_rng(seed)
    sampling = (
        SamplingParams(temperature=0.9, seed=seed, repetition_penalty=1.2, max_tokens=999)
        if sampled
        else GREEDY
    )
    warm = drafter(MODEL, num_slots=600, catch_up_rows=20)
    recomputing = drafter(MODEL, num_slots=600, prefix_sharing=False)
    warm_kv = warm._kv
    tokens = {name: prompt(int(rng.integers(1000)), int(rng.integers(1, 30))) for name in "abc"}
    prompt_len = {name: len(t) for name, t in tokens.items()}
    heard: dict[str, int] = {}
    expected = {name: [0, 0] for name in tokens}
    scores = {name: [0, 0] for name in tokens}
    for _ in range(6):
        items, fresh = [], []
        for name in rng.permutation(list(tokens))[: rng.integers(1, 4)].tolist():
            plan = DraftPlan(depth=int(rng.integers(0, 5)), width=int(rng.integers(1, 5)))
            full = tokens[name]
            whole = opening(name, full, plan, prompt_len=prompt_len[name], sampling=sampling)
            fresh.append(whole)
            items.append(following(name, heard[name], full[heard[name] :], plan) if name in heard else whole)
            heard[name] = len(full)
        result = warm.draft(call(*items, ahead=bool(rng.random() < 0.7)))
        warm_kv.check_invariants()
        for _ in range(rng.integers(0, 6)):
            warm.draft_ahead()
        warm_kv.check_invariants()
        cold = recomputing.draft(call(*fresh, release=list(tokens)))
        cold_trees = trees(cold)
        assert not result.unknown
        for name, tree in trees(result).items():
            assert_same_tree(tree, cold_trees[name])
        for draft in result.drafts:
            scores[draft.request_id][0] += draft.num_scored
            scores[draft.request_id][1] += draft.num_agreed
            tokens[draft.request_id] += random_commit(rng, draft.tree)
        for draft in cold.drafts:  # a cold start scores all of the output at once
            expected[draft.request_id] = [draft.num_scored, draft.num_agreed]
    assert scores == expected
    warm.draft(call(release=list(tokens)))
    warm_kv.check_invariants()
    assert warm.free_slots == 600


def test_accepted_paths_cost_one_row_and_no_more() -> None:
    d = drafter(MODEL)
    context = prompt(1, 20)
    tree = trees(d.draft(call(opening("a", context, DraftPlan(4, 3)))))["a"]
    rows = count_rows(d)
    leaf = int(np.flatnonzero(tree.depth == 4)[0])
    path = [int(tree.token[node]) for node in tree.path(leaf)[1:]]
    d.draft(call(following("a", 20, [*path[:3], 7], DraftPlan(0))))
    assert rows == [1]  # the bonus token
    d.draft(call(following("a", 24, [], DraftPlan(0))))
    d.draft(call(following("a", 24, [], DraftPlan(0))))
    assert rows == [1]  # asked again: known


def test_prompts_are_shared_among_requests_of_one_salt() -> None:
    d = drafter(MODEL)
    rows, context = count_rows(d), prompt(1, 33)

    def read(name: str, salt: str) -> int:
        """Rows that its prompt takes."""
        item = opening(name, context, DraftPlan(1))
        assert item.spec is not None
        before = sum(rows)
        d.draft(call(msgspec.structs.replace(item, spec=msgspec.structs.replace(item.spec, cache_salt=salt))))
        d.draft(call(release=[name]))
        return sum(rows) - before

    assert [read(f"a{salt}", salt) for salt in ("", "mine", "yours")] == [33, 33, 33]
    assert [read(f"b{salt}", salt) for salt in ("", "mine", "yours")] == [1, 1, 1]


def test_what_was_drafted_ahead_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_ahead, "LEAST_LOGP", -30.0)
    d = drafter(MODEL)
    context, plan = prompt(4, 20), DraftPlan(3, 1)
    chain = log_probs_chain(context, 8)
    tree = trees(d.draft(call(opening("a", context, plan), ahead=True)))["a"]
    assert tree.token[1:].tolist() == chain[:3]
    while d.draft_ahead():
        pass
    rows = count_rows(d)
    tree = trees(d.draft(call(following("a", 20, chain[:4], plan))))["a"]
    assert tree.token[1:].tolist() == chain[4:7]
    assert rows == []
    assert not d.draft_ahead(), "the call did not ask for it"


def test_drafting_ahead_ends_when_the_next_call_should_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_ahead, "LEAST_LOGP", -30.0)
    now = 5.0
    monkeypatch.setattr(model_drafter, "perf_counter", lambda: now)
    d = drafter(MODEL)
    asked = call(opening("a", prompt(4, 20), DraftPlan(3, 1)))
    d.draft(msgspec.structs.replace(asked, ahead_s=0.25))
    now = 5.2
    assert d.draft_ahead()
    now = 5.25
    assert not d.draft_ahead(), "there is more, and nobody waits for it"
    now = 5.2
    assert not d.draft_ahead()


def test_who_is_asked_about_again_is_no_longer_drafted_ahead_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tree was still the same, its slots were others' by then: their committed keys were written over."""
    monkeypatch.setattr(draft_ahead, "LEAST_LOGP", -12.0)
    model = llama()
    d, fresh = drafter(model, num_slots=200), drafter(model)
    first, other = prompt(1, 20), prompt(2, 30)
    # It ends early, so that slots are left over, which are given back when it is asked about again.
    d.draft(call(opening("a", first, DraftPlan(5, 4, stop_logp=-0.1)), ahead=True))
    d.draft(call(following("a", 20, [], DraftPlan(1, 1))))
    d.draft(call(opening("b", other, DraftPlan(0))))
    while d.draft_ahead():
        pass
    got = trees(d.draft(call(following("b", 30, [7], DraftPlan(3, 1)))))["b"]
    assert_same_tree(got, trees(fresh.draft(call(opening("b", [*other, 7], DraftPlan(3, 1)))))["b"])


def test_drafting_ahead_ends_at_the_requests_end_and_without_slots() -> None:
    for max_tokens, num_slots in ((23, 1024), (999, 27)):
        d = drafter(MODEL, num_slots=num_slots)
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens - 20)
        d.draft(call(opening("a", prompt(4, 20), DraftPlan(2, 1), sampling=sampling), ahead=True))
        steps = 0
        while d.draft_ahead():
            steps += 1
            assert steps < 50
        held = d._held["a"].tree
        assert held is not None
        assert max(held.depth) <= (2 if max_tokens == 23 else 12)
        d._kv.check_invariants()
        d.draft(call(release=["a"]))
        assert d.free_slots == num_slots
        assert not d.draft_ahead()


def test_nothing_is_drafted_ahead_for_a_request_that_was_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_ahead, "LEAST_LOGP", -30.0)
    d = drafter(MODEL)
    d.draft(call(opening("a", prompt(4, 20), DraftPlan(3, 1)), ahead=True))
    assert d.draft_ahead()
    d.draft(call(opening("b", prompt(5, 20), DraftPlan(0)), release=["a"]))
    assert not d.draft_ahead()
    d._kv.check_invariants()


def test_a_forward_ahead_that_fails_leaves_no_slots_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they were committed once the target said those tokens, and all later drafts made from them."""
    monkeypatch.setattr(draft_ahead, "LEAST_LOGP", -30.0)
    d, fresh = drafter(MODEL), drafter(MODEL)
    context, plan = prompt(4, 20), DraftPlan(3, 1)
    d.draft(call(opening("a", context, plan), ahead=True))
    with monkeypatch.context() as failing:
        failing.setattr(d._model._runner, "forward", lambda segments, keep: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            d.draft_ahead()
    new = [*log_probs_chain(context, 3), 7]
    result = d.draft(call(following("a", 20, new, plan)))
    d._kv.check_invariants()
    expected = fresh.draft(call(opening("a", [*context, *new], plan, prompt_len=20)))
    assert_same_tree(trees(result)["a"], trees(expected)["a"])
    assert result.drafts[0].num_scored == expected.drafts[0].num_scored


def log_probs_chain(context: list[int], length: int) -> list[int]:
    tokens = list(context)
    for _ in range(length):
        tokens.append(int(log_probs(MODEL, tokens).argmax()))
    return tokens[len(context) :]


def count_rows(d: ModelDrafter) -> list[int]:
    rows: list[int] = []
    runner = d._model._runner
    forward = runner.forward

    def counting(segments, keep):  # type: ignore[no-untyped-def]
        rows.append(sum(len(segment.tokens) for segment in segments))
        return forward(segments, keep)

    runner.forward = counting  # type: ignore[method-assign]
    return rows


def test_a_prefetch_scores_the_output_without_drafting() -> None:
    context, rng = prompt(2, 15), np.random.default_rng(0)
    output, right = [], 0
    for _ in range(12):
        best = int(log_probs(MODEL, context + output).argmax())
        token = best if rng.random() < 0.5 else int(rng.integers(VOCAB))
        right += token == best
        output.append(token)
    item = opening("a", context + output, DraftPlan(depth=0), prompt_len=15)
    result = drafter(MODEL).draft(call(item))
    assert result.num_forwards == 1
    (draft,) = result.drafts
    assert (len(draft.tree), draft.num_scored, draft.num_agreed) == (1, 12, right)


def test_positions_behind_are_rolled_back_and_positions_ahead_unknown() -> None:
    d, context = drafter(MODEL), prompt(4, 30)
    d.draft(call(opening("a", context, PLAN)))
    changed = [*context[:25], 1, 2, 3]
    tree = trees(d.draft(call(following("a", 22, changed[22:], PLAN))))["a"]
    fresh = drafter(MODEL)
    assert_same_tree(tree, trees(fresh.draft(call(opening("a", changed, PLAN))))["a"])
    result = d.draft(
        call(following("a", 29, [4], PLAN), following("b", 0, [4], PLAN), following("c", 3, [4], PLAN))
    )
    assert result.unknown == ["a", "b", "c"]
    assert not result.drafts
    tree = trees(d.draft(call(following("a", 28, [4], PLAN))))["a"]  # what was held is held still
    assert_same_tree(tree, trees(fresh.draft(call(following("a", 28, [4], PLAN))))["a"])
    d._kv.check_invariants()


def test_without_slots_the_least_recently_used_request_is_evicted_and_can_be_reopened() -> None:
    d = drafter(MODEL, num_slots=80)
    for name in "abc":
        d.draft(call(opening(name, prompt(ord(name), 20), PLAN)))
    d.draft(call(following("a", 20, [1], PLAN)))
    full = trees(d.draft(call(opening("d", prompt(9, 30), PLAN))))["d"]
    assert full.depth.max() == 3
    d._kv.check_invariants()
    assert d.draft(call(following("b", 20, [1], PLAN))).unknown == ["b"]
    assert not d.draft(call(following("a", 21, [2], PLAN))).unknown
    reopened = trees(d.draft(call(opening("b", [*prompt(ord("b"), 20), 1], PLAN, prompt_len=20))))["b"]
    alone = drafter(MODEL).draft(call(opening("b", [*prompt(ord("b"), 20), 1], PLAN)))
    assert_same_tree(reopened, trees(alone)["b"])
    d._kv.check_invariants()


def test_requests_of_one_call_never_evict_each_other() -> None:
    d = drafter(MODEL, num_slots=64)
    items = [opening(name, prompt(ord(name), 20), PLAN) for name in "abcd"]
    result = d.draft(call(*items))
    assert not result.unknown
    depths = [int(tree.depth.max()) for tree in trees(result).values()]
    assert depths[:2] != [0, 0]
    assert depths[3] == 0
    d._kv.check_invariants()
    result = d.draft(call(following("d", 20, [3], PLAN)))  # it was heard, and now there is room
    assert trees(result)["d"].depth.max() == 3
    assert len(trees(d.draft(call(opening("e", prompt(0, 100), PLAN))))["e"]) == 1  # never fits
    d.draft(call(release="abcde"))
    d._kv.check_invariants()
    assert d.free_slots == 64


def test_a_reopened_request_finds_the_kv_it_left_behind() -> None:
    d = drafter(MODEL)
    context = prompt(7, 100)
    d.draft(call(opening("a", context, PLAN)))
    rows = count_rows(d)
    d.draft(call(opening("b", context, DraftPlan(0)), release=["a"]))
    assert rows[0] < 40


@pytest.mark.parametrize("length", [47, 48, 49])
def test_an_output_that_was_read_before_is_scored_all_the_same(length: int) -> None:
    """Of an answer given twice all keys may be there: its drafter was taken to be unable to follow it."""
    d = drafter(MODEL)
    tokens = prompt(1, length)
    for number in range(3):
        item = opening(f"{number}", tokens, DraftPlan(0), prompt_len=length - 1)
        [draft] = d.draft(call(item, release=[f"{number - 1}"])).drafts
        assert draft.num_scored == 1
    d._kv.check_invariants()


@examples(8)
@given(seed=st.integers(0, 2**32 - 1))
def test_under_slot_pressure_drafts_shrink_but_stay_right(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tight = drafter(MODEL, num_slots=72)
    roomy = drafter(MODEL, prefix_sharing=False)
    tokens = {name: prompt(i, int(rng.integers(5, 30))) for i, name in enumerate("abcde")}
    heard: dict[str, int] = {}
    for _ in range(8):
        items, whole = [], {}
        for name in rng.permutation(list(tokens))[: rng.integers(1, 5)].tolist():
            plan = DraftPlan(depth=int(rng.integers(0, 5)), width=int(rng.integers(1, 4)))
            full = tokens[name]
            whole[name] = opening(name, full, plan)
            known = heard.get(name)
            items.append(whole[name] if known is None else following(name, known, full[known:], plan))
        gone = [name for name in heard if name not in whole and rng.random() < 0.2]
        result = tight.draft(call(*items, release=gone))
        tight._kv.check_invariants()
        fresh = trees(roomy.draft(call(*whole.values(), release=list(tokens))))
        for name, tree in trees(result).items():
            assert_same_tree(tree, fresh[name].subset(np.arange(len(tree), dtype=np.int32)))
            heard[name] = len(tokens[name])
            tokens[name] += random_commit(rng, tree)
        for name in [*gone, *result.unknown]:
            heard.pop(name, None)
    tight.draft(call(release=list(tokens)))
    tight._kv.check_invariants()
    assert tight.free_slots == 72
