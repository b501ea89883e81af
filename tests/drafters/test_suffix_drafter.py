"""The suffix drafter's trees and scores against brute force over the whole text."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.messages import DraftCall, DraftItem, DraftPlan
from drafters.suffix_automaton import Context, SuffixAutomaton
from drafters.suffix_drafter import SuffixAutomatonDrafter
from drafters.suffix_escapes import EscapeRecord, Source
from engine.sampling_params import SamplingParams
from engine.stop_rules import EstimateRule
from tests.drafters.tiny import call, following, opening, trees
from tests.examples import examples

STOP = 3


def suffix(**options: object) -> SuffixAutomatonDrafter:
    return SuffixAutomatonDrafter(**{"vocab_size": 10, "max_tokens": 500, "max_match": 5, **options})  # type: ignore[arg-type]


def naive_distribution(text: list[int], path: list[int], min_match: int, max_match: int) -> dict[int, float]:
    """Probabilities after `text` and then `path`, of contexts that occur in `text`: nothing on record yet."""
    tail = [*text, *path]
    probability: dict[int, float] = {}
    mass, before, asked = 1.0, 0, 0
    for n in range(min(max_match, len(tail)), 0, -1):
        ends = [p for p in range(n, len(text) + 1) if text[p - n : p] == tail[-n:]]
        after = [text[p] for p in ends if p < len(text)]
        if not after or len(ends) == before:  # nothing followed, or a suffix at the same places
            continue
        before = len(ends)
        asked += 1
        if n < min_match or asked > 4:
            break
        fresh = [token for token in after if token not in probability]
        if not fresh:
            continue
        rate = n / (n + 1)
        for token in set(fresh):
            probability[token] = mass * rate * fresh.count(token) / len(fresh)
        mass *= 1 - rate
    return probability


@examples(200)
@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=25),
    min_match=st.integers(1, 3),
    depth=st.integers(0, 4),
    width=st.integers(1, 4),
)
def test_trees_are_those_of_brute_force(text: list[int], min_match: int, depth: int, width: int) -> None:
    sampling = SamplingParams(temperature=0.0, stop_token_ids=(STOP,), max_tokens=1000)
    item = opening("a", text, DraftPlan(depth, width), sampling=sampling)
    tree = trees(suffix(min_match=min_match, scope="request").draft(call(item)))["a"]
    assert np.bincount(tree.depth).max() <= max(width, 1)
    offered: dict[int, list[float]] = {layer: [] for layer in range(1, depth + 1)}
    for node in range(len(tree)):
        path = tree.token[tree.path(node)[1:]].tolist()
        expected = naive_distribution(text, path, min_match, 5)
        if tree.depth[node] == depth or (node and tree.token[node] == STOP):
            assert not len(tree.children(node))
            continue
        offered[int(tree.depth[node]) + 1] += [tree.logp[node] + math.log(p) for p in expected.values()]
        for child in tree.children(node):
            own = math.exp(tree.logp[child] - tree.logp[node])
            assert own == pytest.approx(expected[int(tree.token[child])], rel=1e-4)
    for layer, logps in offered.items():
        drafted = np.sort(tree.logp[tree.depth == layer])[::-1]
        np.testing.assert_allclose(drafted, sorted(logps, reverse=True)[:width], rtol=1e-4)


@examples(60)
@given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    steps=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=5),
    back=st.integers(0, 2),
)
def test_tokens_sent_again_change_nothing_but_what_differs(
    text: list[int], steps: list[list[int]], back: int
) -> None:
    d, plan = suffix(), DraftPlan(3, 2)
    d.draft(call(opening("a", text, plan)))
    tokens = list(text)
    for new in steps:
        start = max(1, len(tokens) - back)
        again = [(t + 1) % 3 for t in tokens[start:]]
        tokens = tokens[:start] + again + new
        result = d.draft(call(following("a", start, again + new, plan)))
        assert result.drafts[0].num_scored >= len(new)
    fresh = suffix(min_match=2)
    fresh._record = d._record
    a = trees(d.draft(call(following("a", len(tokens), [], plan))))["a"]
    b = trees(fresh.draft(call(opening("a", tokens, plan))))["a"]
    assert a.token.tolist() == b.token.tolist()
    np.testing.assert_allclose(a.logp, b.logp, rtol=1e-5)


def test_a_repetition_is_drafted_beyond_the_end_of_the_text() -> None:
    tree = trees(suffix().draft(call(opening("a", [7, 1, 2, 1, 2, 1, 2], DraftPlan(6)))))["a"]
    assert tree.token.tolist() == [2, 1, 2, 1, 2, 1, 2]


@pytest.mark.parametrize(("scope", "drafted"), [("cell", [2, 4, 6, 8]), ("request", [2])])
def test_outputs_of_others_are_drafted_from_if_they_may_be(scope: str, drafted: list[int]) -> None:
    d, plan = suffix(scope=scope), DraftPlan(3)
    d.draft(call(opening("a", [9, 9, 1, 2, 4, 6, 8], DraftPlan(0), prompt_len=2)))
    d.draft(call(opening("b", [5, 1, 2], plan), release=["a"]))
    tree = trees(d.draft(call(following("b", 3, [], plan))))["b"]
    assert tree.token.tolist() == drafted
    # Prompts are not shared.
    tree = trees(d.draft(call(opening("c", [9, 9], plan))))["c"]
    assert len(tree) == 1


def test_an_output_counts_once_however_often_its_request_is_opened() -> None:
    d, plan = suffix(), DraftPlan(1)
    for _ in range(4):
        d.draft(call(opening("a", [9, 1, 2, 4], DraftPlan(0), prompt_len=1)))
    others = [opening(name, [9, 1, 2, 5], DraftPlan(0), prompt_len=1) for name in "bc"]
    d.draft(call(*others, release=["a"]))
    d.draft(call(release=["b", "c"]))
    assert trees(d.draft(call(opening("d", [8, 1, 2], plan))))["d"].token.tolist() == [2, 5]


def test_requests_with_a_salt_are_neither_remembered_nor_told_of_others() -> None:
    def salted(name: str, tokens: list[int], plan: DraftPlan, salt: str, prompt_len: int = 1) -> DraftItem:
        item = opening(name, tokens, plan, prompt_len=prompt_len)
        assert item.spec is not None
        spec = msgspec.structs.replace(item.spec, cache_salt=salt)
        return msgspec.structs.replace(item, spec=spec)

    d, plan = suffix(), DraftPlan(3)
    d.draft(call(salted("a", [9, 9, 1, 2, 4, 6, 8], DraftPlan(0), "mine", prompt_len=2)))
    d.draft(call(opening("b", [5, 1, 2], plan), release=["a"]))
    assert len(trees(d.draft(call(following("b", 3, [], plan))))["b"]) == 1
    d.draft(call(opening("c", [9, 9, 1, 2, 4, 6, 8], DraftPlan(0), prompt_len=2), release=["b"]))
    d.draft(call(salted("d", [5, 1, 2], plan, "mine"), opening("e", [5, 1, 2], plan), release=["c"]))
    drafted = trees(d.draft(call(following("d", 3, [], plan), following("e", 3, [], plan))))
    assert drafted["e"].token.tolist() == [2, 4, 6, 8]
    assert len(drafted["d"]) == 1
    # What it wrote itself it is still told of.
    d.draft(call(salted("f", [1, 2, 4, 1, 2], plan, "mine")))
    assert trees(d.draft(call(following("f", 5, [], plan))))["f"].token.tolist()[:2] == [2, 4]


def test_long_outputs_are_taken_in_piece_by_piece() -> None:
    d = suffix()
    output = [int(t) for t in np.random.default_rng(0).integers(0, 10, 400)]
    d.draft(call(opening("a", [0, *output], DraftPlan(0), prompt_len=1)))
    tail = [0, *output[300:304]]
    tree = trees(d.draft(call(opening("b", tail, DraftPlan(2)), release=["a"])))["b"]
    assert tree.token.tolist() != output[303:306]
    assert not d.draft_ahead()
    tree = trees(d.draft(call(following("b", len(tail), [], DraftPlan(2)))))["b"]
    assert tree.token.tolist() == output[303:306]


def test_scores_count_tokens_no_context_predicted_as_missed() -> None:
    d = suffix(min_match=1)
    d.draft(call(opening("a", [1, 2, 3, 1], DraftPlan(1))))
    draft = d.draft(call(following("a", 4, [2, 4, 1], DraftPlan(1)))).drafts[0]
    assert (draft.num_scored, draft.num_agreed) == (3, 1)  # 2 after 1; 3, not 4, after 1 2; nothing for 1


def test_probabilities_follow_what_contexts_were_worth() -> None:
    record = EscapeRecord()
    start = record.rate(Source.OWN, 3, 1)
    for _ in range(50):
        record.add(Source.OWN, 3, 1, False)
        record.add(Source.OWN, 4, 1, True)
    assert record.rate(Source.OWN, 3, 1) < 0.1 < start < record.rate(Source.OWN, 4, 1) < 1
    assert record.rate(Source.RECENT, 3, 1) == start


def test_thresholds_and_the_stop_rule_end_drafts() -> None:
    text = [1, 2, 4, 6, 8, 5, 1, 2]
    full = trees(suffix().draft(call(opening("a", text, DraftPlan(6)))))["a"]
    assert full.depth.max() == 6
    for plan in (DraftPlan(6, stop_logp=float(full.logp[2]) + 1e-3), DraftPlan(6, stop_token_logp=-1e-3)):
        assert trees(suffix().draft(call(opening("a", text, plan))))["a"].depth.max() < 3
    rule = EstimateRule(
        num_requests=1, base_s=0.01, first_layer_s=0.0, layer_s=0.0, token_s=0.009, mean_confidence=0.5
    )
    item = opening("a", text, DraftPlan(6))
    stopped = trees(suffix().draft(DraftCall(call_id=1, items=[item], stop_rule=rule)))["a"]
    assert 1 <= stopped.depth.max() < 6


def test_a_list_of_thousands_costs_a_step_no_more_than_one_of_hundreds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each entry begins alike: all that ever followed was looked at, for every node of the tree."""
    followers, seen = SuffixAutomaton.followers, [0]

    def counted(self: SuffixAutomaton, context: Context) -> Iterator[tuple[int, int]]:
        for pair in followers(self, context):
            seen[0] += 1
            yield pair

    monkeypatch.setattr(SuffixAutomaton, "followers", counted)
    looked_at = []
    for length in (300, 3000):
        drafter = suffix(vocab_size=4000, max_tokens=10_000)
        text = [token for entry in range(length) for token in (0, 1, 10 + entry)]
        drafter.draft(call(opening("a", text, DraftPlan(0))))
        seen[0] = 0
        tree = trees(drafter.draft(call(following("a", len(text), [0, 1], DraftPlan(4, 4)))))["a"]
        assert tree.num_drafted > 4
        looked_at.append(seen[0])
    assert looked_at[0] == looked_at[1]


def test_requests_are_forgotten_and_unknown_ones_named() -> None:
    d, plan = suffix(), DraftPlan(2)
    d.draft(call(opening("a", [1, 2, 1, 2], plan)))
    result = d.draft(call(following("a", 4, [1], plan), following("b", 2, [1], plan)))
    assert (result.unknown, len(result.drafts)) == (["b"], 1)
    assert d.draft(call(following("a", 5, [1], plan), release=["a"])).unknown == ["a"]
    with pytest.raises(ValueError, match="min_match"):
        suffix(min_match=6)


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from drafters.factory import build_drafter; "
        "build_drafter('suffix_automaton', vocab_size=9, max_tokens=99); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
