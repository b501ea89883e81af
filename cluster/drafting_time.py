"""How long drafting a batch's trees should have taken, by what came of it."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.cost_model import CostModel
from cluster.requests import Request
from engine.tree_batch import TreeBatch, tree_shapes, widest


def drafting_seconds(cost: CostModel, drafted: Sequence[Request], trees: TreeBatch) -> float:
    """Predicted seconds, drafters working at the same time; 0 where nothing was drafted.

    Args:
        cost: times of draft calls.
        drafted: requests.
        trees: their candidate trees.
    """
    by_drafter: dict[str, list[int]] = {}
    for place, (request, tree) in enumerate(zip(drafted, trees, strict=True)):
        if len(tree.token) > 1:
            by_drafter.setdefault(request.drafted_by, []).append(place)
    if len(by_drafter) == 1:  # mostly, and then no tree needs looking at by itself
        shapes = {name: widest(trees) for name in by_drafter}
    else:
        widths, depths = tree_shapes(trees)
        shapes = {
            name: (int(widths[places].max()), int(depths[places].max()))
            for name, places in by_drafter.items()
        }
    seconds = 0.0
    for name, places in by_drafter.items():
        num_context = sum([drafted[place].num_tokens for place in places])
        seconds = max(seconds, cost.draft_seconds(name, len(places), *shapes[name], num_context))
    return seconds
