"""Times of one iteration: drafted for, verified, committed."""

from __future__ import annotations

from typing import NamedTuple


class Iteration(NamedTuple):
    """Times of a verify call's iteration, in seconds.

    Attributes:
        elapsed_s: since the first of its requests began to be drafted for.
        draft_s: of the slowest draft call.
        slot_s: since then or since the verify call before, whichever is less: what the iteration took of
            the target's time, its waiting for drafts included.
        drafted: whether anything was drafted for it, beside the target or not.
        was_ahead: whether its call was sent before the one before was answered.
    """

    elapsed_s: float
    draft_s: float
    slot_s: float
    drafted: bool = False
    was_ahead: bool = False
