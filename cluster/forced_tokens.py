"""Tokens that a request's grammar leaves no choice about: how many a step may add, and their accounts."""

from __future__ import annotations

from typing import Protocol

from cluster.requests import GRAMMAR, Request
from cluster.stream_messages import Submit
from engine.tree import TokenTree
from verifier.messages import Verdict

#: Most of them in one step of a request: each is a row of the target's forward.
MOST_FORCED = 8


def most_forced(submit: Submit, tree: TokenTree) -> int:
    """How many the target may add to a request's draft tree."""
    wish = submit.speculation
    if submit.sampling.constraint is None or wish.mode == "off" or wish.drafters:
        return 0
    left = MOST_FORCED if wish.max_tokens is None else min(MOST_FORCED, wish.max_tokens - tree.num_drafted)
    return max(0, left)


class Counts(Protocol):
    """The scheduler's counters that a verdict adds to."""

    drafted_tokens: int
    verified_tokens: int
    accepted_tokens: int
    verified_by_drafter: dict[str, int]
    accepted_by_drafter: dict[str, int]


def count(totals: Counts, verdict: Verdict) -> None:
    """Count the tokens of a verdict that a grammar added to its tree."""
    totals.drafted_tokens += verdict.num_forced
    totals.verified_tokens += verdict.num_forced
    totals.accepted_tokens += verdict.num_forced_accepted
    totals.verified_by_drafter[GRAMMAR] += verdict.num_forced
    totals.accepted_by_drafter[GRAMMAR] += verdict.num_forced_accepted


def drafter_of(request: Request, verdict: Verdict) -> str:
    """Who drafted the first of the accepted tokens; "" if none was."""
    if verdict.num_accepted:
        return request.drafted_kind
    return GRAMMAR if verdict.num_forced_accepted else ""
