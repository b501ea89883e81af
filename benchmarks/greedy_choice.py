"""Greedy choice of a drafter by estimated goodput, with hysteresis, and of one worth finding out about.

The rule that cells had before selectors (docs/decisions/0007); benchmarks/drafter_choice.py compares with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from selector.goodput import best_goodput

# A rival must promise this much more goodput before a request moves to it.
HYSTERESIS = 1.08


class Candidate(msgspec.Struct, frozen=True):
    """One drafter as it looks to one request.

    Attributes:
        name: the drafter.
        rate: estimated acceptance rate on this request.
        draft_s: seconds per drafted token.
        load: requests it serves now.
        capacity: requests it may serve (SPIN's B_j).
    """

    name: str
    rate: float
    draft_s: float
    load: int
    capacity: int


def goodput(candidate: Candidate, verify_s: float, token_s: float, max_depth: int) -> float:
    """Best tokens per second over draft depths: l(a, d) / (verify + d * (draft + token))."""
    return best_goodput(candidate.rate, candidate.draft_s, verify_s, token_s, max_depth)


def choose(
    candidates: Sequence[Candidate], current: str, verify_s: float, token_s: float, max_depth: int
) -> str:
    """The drafter to use next; empty if none has room.

    Args:
        candidates: drafters the request may use.
        current: the drafter serving it now, or empty; its own place counts as room.
        verify_s: seconds of a verify step without drafts.
        token_s: seconds one more verified token adds.
        max_depth: deepest draft.
    """
    best_name, best_key = "", (float("-inf"), 0, "")
    for candidate in candidates:
        stays = candidate.name == current
        if not stays and candidate.load >= candidate.capacity:
            continue
        value = goodput(candidate, verify_s, token_s, max_depth) * (HYSTERESIS if stays else 1.0)
        # Equal promises go to the less loaded drafter, then by name, so that the choice is deterministic.
        key = (value, -candidate.load, candidate.name)
        if key > best_key:
            best_name, best_key = candidate.name, key
    return best_name


def most_promising(
    candidates: Sequence[Candidate], to_beat: float, verify_s: float, token_s: float, max_depth: int
) -> str:
    """Whom to score next (optimism in the face of uncertainty, as in UCB1 and LinUCB).

    Args:
        candidates: drafters that can be scored, each with the highest rate it may reasonably have.
        to_beat: estimated goodput of the present choice.
        verify_s, token_s, max_depth: as for `choose`.

    Returns:
        The drafter that could be best, if that is better than the present choice; else empty.
    """
    best_name, best_key = "", (to_beat, "")
    for candidate in candidates:
        key = (goodput(candidate, verify_s, token_s, max_depth), candidate.name)
        if key > best_key and key[0] > to_beat:
            best_name, best_key = candidate.name, key
    return best_name
