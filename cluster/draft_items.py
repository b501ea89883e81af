"""Requests' parts of draft calls, and whether a drafter has read enough of a request to draft for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cluster.drafter_state import DrafterState
from cluster.requests import Request
from cluster.switching import READ_WITH_DRAFT
from drafters.messages import DraftItem, DraftPlan
from engine.proposals import Proposals


def draft_items(
    drafter: DrafterState, requests: Sequence[Request], plans: Sequence[DraftPlan]
) -> list[DraftItem]:
    """The requests' parts of one call to a drafter, which has then heard of all their tokens.

    Args:
        drafter: whom the call goes to.
        requests: in it.
        plans: one for each.
    """
    name, known, has_heads = drafter.name, drafter.known, drafter.capabilities.num_candidates > 0
    new: list[int] = []
    parts = []
    for request in requests:
        heard, begin = request.heard, len(new)
        start = heard.get(name, 0) if request.request_id in known else 0
        if start:
            # Mostly it has read the prompt.
            unread = start - request.num_prompt
            new += request.output[unread:] if unread >= 0 else request.tokens_from(start)
        else:
            known.add(request.request_id)
        heard[name] = request.num_tokens
        parts.append((start, begin, len(new)))
    tokens = np.array(new, dtype=np.int32)  # of all, so that each has a view of it
    items = []
    for request, plan, (start, begin, end) in zip(requests, plans, parts, strict=True):
        proposals = request.proposals if has_heads else None
        if start == 0:
            items.append(opening(request, plan, proposals))
            continue
        items.append(
            DraftItem(
                request_id=request.request_id,
                start=start,
                tokens=tokens[begin:end],
                plan=plan,
                proposals=proposals,
            )
        )
    return items


def opening(request: Request, plan: DraftPlan, proposals: Proposals | None = None) -> DraftItem:
    """The item that opens the request on a drafter as it stands."""
    return DraftItem(
        request_id=request.request_id,
        start=0,
        tokens=np.zeros(0, dtype=np.int32),
        plan=plan,
        spec=request.spec(),
        proposals=proposals,
    )


def has_read(drafter: DrafterState) -> Callable[[Request], bool]:
    """Says of requests whether the drafter has read nearly all of them and reads no other: nobody waits.

    True as long as nothing is sent to the drafter.
    """
    if not drafter.capabilities.needs_prefill:
        return lambda _: True
    if any(call.depth == 0 for call in drafter.outstanding.values()):
        return lambda _: False
    name, known, reading = drafter.name, drafter.known, drafter.reading
    # Its own draft, all of it accepted, and the target's token are never too many, or it would draft for
    # nobody in the step after.
    most = max(READ_WITH_DRAFT, drafter.capabilities.max_depth + 1)

    def has_read_it(request: Request) -> bool:
        request_id = request.request_id
        if request_id not in known or request_id in reading:
            return False
        return request.num_tokens - request.heard.get(name, 0) <= most

    return has_read_it
