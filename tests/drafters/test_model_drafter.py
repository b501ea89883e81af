"""The beam against a brute-force search, and the independence of a tree from everything around it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from drafters.messages import DraftPlan
from engine.best_tokens import best_on_device, best_on_host
from engine.sampling_params import SamplingParams
from engine.tree import TokenTree
from tests.drafters.tiny import (
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

MODEL = llama()


def brute_force(
    model: LlamaForCausalLM, context: list[int], plan: DraftPlan, stops: frozenset[int] = frozenset()
) -> TokenTree:
    """Beam search that runs the whole sequence of every path, with the plain model."""
    token, parent, logp, depth = [context[-1]], [-1], [0.0], [0]
    paths: dict[int, list[int]] = {0: []}
    for layer in range(1, plan.depth + 1):
        candidates = [
            (logp[node] + float(value), node, child)
            for node, path in paths.items()
            if node == 0 or token[node] not in stops
            for child, value in enumerate(log_probs(model, context + path))
        ]
        best = sorted(candidates, reverse=True)[: plan.width]
        before, paths = paths, {}
        for value, node, child in best:
            paths[len(token)] = [*before[node], child]
            token.append(child)
            parent.append(node)
            logp.append(value)
            depth.append(layer)
        if not best or best[0][0] < plan.stop_logp:
            break
    return TokenTree.of(token, parent, logp, depth)


@pytest.mark.parametrize(("depth", "width"), [(1, 1), (5, 1), (1, 4), (4, 3), (3, 6)])
def test_the_tree_is_the_one_a_brute_force_beam_search_finds(depth: int, width: int) -> None:
    plan = DraftPlan(depth=depth, width=width)
    for seed in range(3):
        context = prompt(seed, 11)
        tree = trees(drafter(MODEL).draft(call(opening("a", context, plan))))["a"]
        assert_same_tree(tree, brute_force(MODEL, context, plan))


def test_the_tree_has_the_shape_of_adaserve() -> None:
    tree = trees(drafter(MODEL).draft(call(opening("a", prompt(3, 9), DraftPlan(depth=5, width=4)))))["a"]
    assert np.bincount(tree.depth).tolist() == [1, 4, 4, 4, 4, 4]
    for layer in range(1, 6):
        assert (np.diff(tree.logp[tree.depth == layer]) <= 0).all()
    assert (tree.logp[1:] <= tree.logp[tree.parent[1:]]).all()


def test_a_stop_token_ends_its_branch() -> None:
    context, plan = prompt(5, 12), DraftPlan(depth=4, width=3)
    free = brute_force(MODEL, context, plan)
    stop = int(free.token[np.flatnonzero(free.depth == 2)[0]])
    sampling = SamplingParams(temperature=0.0, stop_token_ids=(stop,), max_tokens=99)
    tree = trees(drafter(MODEL).draft(call(opening("a", context, plan, sampling=sampling))))["a"]
    assert_same_tree(tree, brute_force(MODEL, context, plan, frozenset({stop})))
    stopped = np.flatnonzero(tree.token[1:] == stop) + 1
    assert len(stopped)
    assert not np.isin(stopped, tree.parent).any()


def test_the_stop_rule_ends_the_draft_after_the_layer_that_falls_below() -> None:
    context = prompt(6, 12)
    free = brute_force(MODEL, context, DraftPlan(depth=6, width=2))
    best = [free.logp[free.depth == layer].max() for layer in range(1, 7)]
    plan = DraftPlan(depth=6, width=2, stop_logp=float(best[2]) + 1e-3)
    tree = trees(drafter(MODEL).draft(call(opening("a", context, plan))))["a"]
    assert tree.depth.max() == 3


def test_a_tree_does_not_depend_on_the_batch_around_it() -> None:
    plans = [
        DraftPlan(4, 3),
        DraftPlan(1, 1),
        DraftPlan(6, 1),
        DraftPlan(0, 1),
        DraftPlan(3, 8),
        DraftPlan(5, 2),
    ]
    items = [opening(f"r{i}", prompt(20 + i, 3 + 9 * i), plan) for i, plan in enumerate(plans)]
    together = trees(drafter(MODEL).draft(call(*items)))
    for item in items:
        alone = trees(drafter(MODEL).draft(call(item)))[item.request_id]
        assert_same_tree(together[item.request_id], alone)
    assert len(together["r3"]) == 1


def test_long_prompts_are_caught_up_in_bounded_forwards() -> None:
    items = [opening(f"r{i}", prompt(i, 10 + 17 * i), DraftPlan(3, 2)) for i in range(5)]
    chunked, whole = drafter(MODEL, catch_up_rows=13), drafter(MODEL)
    a, b = chunked.draft(call(*items)), whole.draft(call(*items))
    assert b.num_forwards == 3
    assert a.num_forwards == -(-sum(10 + 17 * i for i in range(5)) // 13) + 2
    for request_id, tree in trees(a).items():
        assert_same_tree(tree, trees(b)[request_id])


def test_best_tokens_are_the_same_on_host_and_device() -> None:
    logp = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    device = best_on_device(logp, 6)
    host = best_on_host(logp.numpy().copy(), 6)
    np.testing.assert_array_equal(host[0], device[0])
    np.testing.assert_array_equal(host[1], device[1])


def test_drafts_end_with_the_context_and_with_the_request() -> None:
    short = llama(max_tokens=16)
    plan = DraftPlan(depth=4, width=2)
    for length, depth in [(11, 4), (13, 3), (15, 1), (16, 0), (17, 0), (40, 0)]:
        d = drafter(short)
        tree = trees(d.draft(call(opening("a", prompt(length, length), plan))))["a"]
        assert tree.depth.max() == depth
        assert trees(d.draft(call(following("a", length, [1], plan))))["a"].token[0] == 1
    sampling = SamplingParams(temperature=0.0, max_tokens=3)
    tree = trees(drafter(MODEL).draft(call(opening("a", prompt(1, 9), plan, sampling=sampling))))["a"]
    assert tree.depth.max() == 2  # the third token is the verifier's own


def test_a_token_beyond_the_vocabulary_costs_that_request_its_drafts_only() -> None:
    d, plan = drafter(MODEL), DraftPlan(2, 2)
    d.draft(call(opening("a", prompt(1, 9), plan), opening("b", prompt(2, 9), plan)))
    for start in (9, 11):
        sizes = {
            name: len(tree)
            for name, tree in trees(
                d.draft(call(following("a", start, [3, 50], plan), following("b", start, [3, 4], plan)))
            ).items()
        }
        assert sizes == {"a": 1, "b": 5}
