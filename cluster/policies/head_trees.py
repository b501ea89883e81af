"""SmartSpec on decoding heads: how many of each head's tokens to verify (section 4.4, eq. 10; figure 16)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from cluster.forest import Forest
from cluster.policies.base import DecodeRequest, Int32
from cluster.policies.goodput import Float64, Int64, StepTimes, head_nodes, head_tokens
from cluster.policies.specinfer import sibling_rank
from engine.tree import TokenTree


def head_limits(batch: Sequence[DecodeRequest], limits: Int64) -> Int64:
    """int64 [requests], of `limits` those of requests drafted for by heads; 0 for the others."""
    return np.where([request.num_heads > 0 for request in batch], limits, 0)


@lru_cache(maxsize=64)
def head_shapes(num_heads: int, most: int, most_in_layer: int) -> Int64:
    """int64 [shapes, heads], every choice of k_1..k_h in 0..`most`, in order of tokens verified.

    Heads after one with k = 0 have 0 too. A layer of the full tree, which has `prod of k_i` nodes, is at most
    `most_in_layer` wide.
    """
    # Head by head, and none too wide: all `most ** num_heads` would hold the event loop up for seconds.
    layer: list[tuple[tuple[int, ...], int]] = [((), 1)]
    shapes = [(0,) * num_heads]
    for depth in range(1, num_heads + 1):
        layer = [
            ((*widths, width), nodes * width)
            for widths, nodes in layer
            for width in range(1, min(most, most_in_layer // nodes) + 1)
        ]
        shapes += [(*widths, *(0,) * (num_heads - depth)) for widths, _ in layer]
    found = np.array(shapes, dtype=np.int64)
    return found[np.argsort(head_nodes(found), kind="stable")]


def best_head_widths(
    rates: Float64, limits: Int64, times: StepTimes, num_heads: int, most: int, most_in_layer: int
) -> Int64:
    """int64 [heads], the k_1..k_h with the highest goodput; the fewest tokens of equals.

    Args:
        rates: float64 [heads], a_i: acceptance rate of any one candidate of head i.
        limits: int64 [requests], most tokens each may draft with heads; 0 for those that just decode.
        times: predicted seconds of the whole batch.
        num_heads: h.
        most: most candidates of a head.
        most_in_layer: widest beam that can be drafted.
    """
    shapes = head_shapes(num_heads, most, most_in_layer)
    tokens = np.zeros(len(shapes))
    depth, nodes = np.zeros(len(shapes), dtype=np.int64), np.zeros(len(shapes), dtype=np.int64)
    for limit, count in zip(*np.unique(limits, return_counts=True), strict=True):
        widths = np.where(np.arange(num_heads) < limit, shapes, 0)
        tokens += count * head_tokens(rates, widths)
        nodes += count * head_nodes(widths)
        depth = np.maximum(depth, (widths > 0).sum(axis=1))
    seconds = times.roots_s[depth] + times.added_s[nodes]
    best: Int64 = shapes[int(np.argmax(tokens / seconds))]
    return best


def full_trees(trees: Sequence[TokenTree], widths: Sequence[Int64]) -> list[Int32]:
    """Nodes of each tree among the first `widths[i]` children of their parents, by layer i.

    Where the beam gave its places to other branches, a tree has fewer nodes than the full one (as
    `SpecInfer`).
    """
    forest = Forest.of(trees)
    drafted = np.flatnonzero(forest.parent >= 0)
    tree = np.repeat(np.arange(len(trees)), [len(one) for one in trees])
    deepest = max(int(forest.depth.max()), *(len(one) for one in widths))
    allowed_width = np.zeros((len(trees), deepest), dtype=np.int64)
    for row, one in enumerate(widths):
        allowed_width[row, : len(one)] = one
    allowed = np.ones(forest.num_nodes)
    allowed[drafted] = sibling_rank(forest)[drafted] < allowed_width[tree[drafted], forest.depth[drafted] - 1]
    return forest.chosen_nodes(forest.path_product(allowed) > 0.0)
