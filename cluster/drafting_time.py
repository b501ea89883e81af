"""How long a batch's drafts should have taken, and for how long drafters may go on beside the target."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.cost_model import CostModel
from cluster.policies.decode_batch import MOST_CERTAIN_RATE, DecodeBatch
from cluster.requests import Request
from drafters.messages import DraftPlan
from engine.tree_batch import TreeBatch, tree_shapes, widest

# A drafter may go on for so many times as long as its next call should take, and for so long at least.
AHEAD_TIMES, LEAST_AHEAD_S = 1.5, 1e-3


def seconds_ahead(
    cost: CostModel, batch: DecodeBatch, plans: Sequence[DraftPlan], overhead_s: float
) -> float:
    """For how long drafters may work ahead, which then have nothing to wait for.

    What they compute in vain takes memory bandwidth from the target, and if the next steps are plain ones, no
    call tells them to end: these then seem slow, and are not found to pay.

    Args:
        cost: times of verify calls.
        batch: requests of the step.
        plans: shapes of their drafts. How much of these is verified is not known yet: about as much as should
            be accepted, and a token more of each.
        overhead_s: seconds of a step beside drafting and verifying.
    """
    rows = float(len(batch))
    for view, plan in zip(batch, plans, strict=True):
        if plan.depth > 0:
            rate = min(view.rate, MOST_CERTAIN_RATE)
            accepted = rate * (1.0 - rate**plan.depth) / (1.0 - rate)
            rows += min(plan.depth * plan.width, 1.0 + accepted)
    verify_s = cost.verify_seconds(len(batch), round(rows), batch.num_context, drafted=True)
    return max(LEAST_AHEAD_S, AHEAD_TIMES * (verify_s + overhead_s))


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
