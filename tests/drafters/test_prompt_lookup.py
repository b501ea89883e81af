"""Prompt lookup against a naive search over the whole sequence."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.messages import DraftPlan
from drafters.prompt_lookup import PromptLookupDrafter
from engine.sampling_params import SamplingParams
from engine.tree import TokenTree
from tests.drafters.tiny import call, following, opening, trees
from tests.examples import examples

STOP = 3


def lookup(**options: int) -> PromptLookupDrafter:
    return PromptLookupDrafter(**{"vocab_size": 10, "max_tokens": 500, "max_ngram": 3, **options})


def naive_positions(tokens: list[int], min_ngram: int, max_ngram: int) -> list[int]:
    """Where the text after an earlier occurrence of a suffix begins, in order of preference."""
    found: list[int] = []
    for n in range(max_ngram, min_ngram - 1, -1):
        ends = [p for p in range(n, len(tokens)) if tokens[p - n : p] == tokens[len(tokens) - n :]]
        found += [p for p in ends[::-1][:32] if p not in found]
    return found


def naive_paths(tokens: list[int], min_ngram: int, plan: DraftPlan) -> set[tuple[int, ...]]:
    """Every path of the tree, from the nodes below the root."""
    layers: list[set[tuple[int, ...]]] = [set() for _ in range(plan.depth + 1)]
    for position in naive_positions(tokens, min_ngram, 3):
        text = list(tokens)
        for depth in range(1, plan.depth + 1):
            text.append(text[position + depth - 1])
            path = tuple(text[len(tokens) :])
            if path not in layers[depth] and len(layers[depth]) >= plan.width:
                break
            layers[depth].add(path)
            if path[-1] == STOP:
                break
    return set().union(*layers)


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.token[tree.path(node)[1:]].tolist()) for node in range(1, len(tree))}


@examples(150)
@given(
    steps=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=6),
    min_ngram=st.integers(1, 3),
    depth=st.integers(0, 5),
    width=st.integers(1, 4),
    back=st.integers(0, 4),
)
def test_trees_and_scores_are_those_of_a_naive_search(
    steps: list[list[int]], min_ngram: int, depth: int, width: int, back: int
) -> None:
    plan, d = DraftPlan(depth, width), lookup(min_ngram=min_ngram)
    sampling = SamplingParams(temperature=0.0, stop_token_ids=(STOP,), max_tokens=1000)
    tokens: list[int] = []
    for step, new in enumerate(steps):
        if step == 0:
            tokens = list(new)
            item, scored = opening("a", tokens, plan, sampling=sampling), []
        else:
            start = max(1, len(tokens) - back)
            again = tokens[start:] if step % 2 else [(t + 1) % 4 for t in tokens[start:]]
            scored = [] if again == tokens[start:] else list(range(start, len(tokens)))
            tokens = tokens[:start] + again
            scored += range(len(tokens), len(tokens) + len(new))
            tokens += new
            item = following("a", start, again + new, plan)
            scored = [p for p in scored if p >= len(steps[0])]
        result = d.draft(call(item))
        tree = trees(result)["a"]
        assert tree.token[0] == tokens[-1]
        assert paths(tree) == naive_paths(tokens, min_ngram, plan)
        assert (tree.logp[1:] < tree.logp[tree.parent[1:]]).all()
        right = 0
        for p in scored:
            best = naive_positions(tokens[:p], min_ngram, 3)
            right += bool(best) and tokens[best[0]] == tokens[p]
        assert (result.drafts[0].num_scored, result.drafts[0].num_agreed) == (len(scored), right)


def test_a_repetition_is_drafted_beyond_the_end_of_the_text() -> None:
    tree = trees(lookup().draft(call(opening("a", [7, 1, 2, 1, 2, 1, 2], DraftPlan(6)))))["a"]
    assert tree.token.tolist() == [2, 1, 2, 1, 2, 1, 2]


def test_agreement_raises_the_estimate_and_surprise_lowers_it() -> None:
    plan = DraftPlan(1)

    def estimate(continuations: list[int]) -> float:
        d = lookup(min_ngram=1, max_ngram=1)
        tokens = [1, 2]
        d.draft(call(opening("a", tokens, plan)))
        for token in continuations:
            d.draft(call(following("a", len(tokens), [1, token], plan)))
            tokens += [1, token]
        return float(trees(d.draft(call(following("a", len(tokens), [1], plan))))["a"].logp[1])

    assert estimate([2] * 6) > estimate([2, 2, 3, 4, 5, 6])


def test_requests_are_forgotten_and_unknown_ones_named() -> None:
    d, plan = lookup(), DraftPlan(2)
    d.draft(call(opening("a", [1, 2, 1, 2], plan)))
    result = d.draft(call(following("a", 4, [1], plan), following("b", 2, [1], plan)))
    assert (result.unknown, len(result.drafts)) == (["b"], 1)
    assert d.draft(call(following("a", 9, [1], plan))).unknown == ["a"]
    assert d.draft(call(following("a", 5, [1], plan), release=["a"])).unknown == ["a"]


def test_trees_keep_to_context_and_bounds() -> None:
    d = lookup(max_tokens=8, max_depth=4, max_width=1)
    tree = trees(d.draft(call(opening("a", [1, 2] * 3, DraftPlan(9, 9)))))["a"]
    assert (tree.depth.max(), np.bincount(tree.depth).max()) == (2, 1)
    with pytest.raises(ValueError, match="min_ngram"):
        lookup(min_ngram=4, max_ngram=2)


def test_prompt_lookup_needs_no_torch() -> None:
    code = (
        "import sys; from drafters.factory import build_drafter; "
        "build_drafter('prompt_lookup', vocab_size=9, max_tokens=99); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
