"""Whether slots and prefixes end up the same if a call is planned before another is settled, or after it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from verifier.messages import VerifyCall
from verifier.planning import Planned


def commute(before: Sequence[Planned], call: VerifyCall, names: Collection[str], empty_slots: int) -> bool:
    """Whether ranks that plan `call` before they settle what is planned of the call before, and ranks that
    plan it afterwards, hold the same shared prefixes, in the same order of use, and as many free slots.

    If they do not, one rank evicts what another keeps, and some later prompt begins at different tokens.

    Args:
        before: items of the call before, its verdicts not known yet.
        call: the one that follows.
        names: requests that have rows in the call before.
        empty_slots: slots that nothing is evicted for.
    """
    # Settling publishes prompts that are complete, and frees what is rejected of trees.
    publishes = any(p.is_prefill and p.tree is not None for p in before)
    rejects = any(p.tree is not None and not p.is_prefill and not p.decides_one for p in before)
    # Those whose rows the device still computes can be released, published and freed, only afterwards.
    releases_late = any(request_id in names for request_id in call.release)
    opens = any(item.spec is not None for item in call.prefill)
    # Who evicts, or makes room for forced tokens, looks at how many are free.
    counts = num_rows(call) > empty_slots or any(item.max_forced for item in call.verify)
    if publishes and (opens or counts or call.release):
        return False
    if releases_late and (opens or counts):
        return False
    return not (rejects and counts)


def num_rows(call: VerifyCall) -> int:
    """The most rows that a call can have."""
    of_trees = sum([item.num_nodes + item.max_forced for item in call.verify])
    return of_trees + sum([item.num_tokens for item in call.prefill])
