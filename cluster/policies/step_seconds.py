"""What steps with drafts and without are predicted to take, and what of it decoding pays for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cluster.policies.base import StepContext
from cluster.policies.decode_batch import DecodeBatch

Float64 = NDArray[np.float64]

# However full of prompts the steps are: what a step costs beside them is never quite nothing.
MOST_ON_PROMPTS = 0.99


def plain_at_best(plain: float, batch: DecodeBatch, context: StepContext) -> float:
    """Tokens per second of plain steps if they took no longer than the same steps after drafts do.

    Drafters slow the target, and not the other way round. Plain steps that seem slower were the rule when the
    whole machine was slow: if that were believed, they would not be tried again.
    """
    n = len(batch)
    verify_s = context.cost.verify_seconds(n, n, batch.num_context, drafted=True)
    beside_s = min(context.plain_overhead_s, context.draft_overhead_s)
    return max(plain, n / (verify_s + beside_s - spent_on_prompts(n, context, drafted=True)))


def drafted_step_s(batch: DecodeBatch, num_rows: int, context: StepContext) -> tuple[float, float]:
    """Seconds of a step that verifies so many rows, and of that what decoding pays for.

    Drafting is spent already, but it belongs to the step whose tokens per second are maximised.
    """
    added_s = added_by_drafts(batch, num_rows - len(batch), context)
    verify_s = context.cost.verify_seconds(len(batch), len(batch), batch.num_context, drafted=True)
    whole_s = context.draft_s + context.draft_overhead_s + verify_s + float(np.add.reduce(added_s))
    return whole_s, whole_s - spent_on_prompts(len(batch), context, drafted=True)


def added_by_drafts(batch: DecodeBatch, most: int, context: StepContext, *, taken: int = 0) -> Float64:
    """float64 [most], seconds that each draft token adds to a step, in which prompts are read beside them.

    Args:
        batch: requests of the step.
        most: tokens considered.
        context: costs, and how many rows of prompts there are: past the knee of the roofline with them, each
            token costs its time, and experts that they need are read for them.
        taken: tokens that the step has already.
    """
    n = len(batch)
    rows = n + taken + context.prompt_rows
    return context.cost.verify_added_seconds(rows, most, batch.num_context / n)


def spent_on_prompts(num_requests: int, context: StepContext, *, drafted: bool) -> float:
    """Seconds of a step that decoding does not pay for; fewer than it has, whatever overhead was measured.

    Weights are read and messages sent for prompts whether or not a step decodes. While they fill every step,
    tokens that drafts save cost next to nothing, and the time of drafting is lost to the prompts. As long as
    there is room for more of them in a step, a step saved is saved: hence the power.

    Args:
        num_requests: that decode in the step.
        context: costs, and the share that prompts have of the steps to come.
        drafted: whether they are drafted for.
    """
    # What prompts need besides is seen in plain steps; drafted ones may be measured to have less than that.
    beside_s = context.plain_overhead_s
    if drafted:
        beside_s = min(beside_s, context.draft_overhead_s)
    fixed_s = context.cost.verify_fixed_seconds(num_requests, drafted=drafted) + beside_s
    return min(context.prompt_share**8, MOST_ON_PROMPTS) * fixed_s
