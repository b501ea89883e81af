"""Why a finished request missed an objective: what took more of the time allowed than its usual share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.metric_catalog import CAUSES
from cluster.stream_messages import Objective, Receipt


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """What a cell did while a request was decoded, in seconds.

    Attributes:
        draft_s: iterations waited for drafters.
        verify_s: the target computed draft trees.
        prefill_s: the target computed prompts of others.
    """

    draft_s: float = 0.0
    verify_s: float = 0.0
    prefill_s: float = 0.0

    def since(self, before: DecodeTimes) -> DecodeTimes:
        """What was added to these running totals."""
        return DecodeTimes(
            self.draft_s - before.draft_s,
            self.verify_s - before.verify_s,
            self.prefill_s - before.prefill_s,
        )


def missed(objective: Objective, receipt: Receipt) -> dict[str, bool]:
    """By objective that the request has and that can be judged, whether it was missed."""
    pairs = {
        "ttft": (receipt.ttft_ms, objective.ttft_ms),
        "tpot": (receipt.tpot_ms, objective.tpot_ms),
        "e2e": (receipt.e2e_ms, objective.e2e_ms),
    }
    return {
        name: took > allowed
        for name, (took, allowed) in pairs.items()
        if took is not None and allowed is not None
    }


def cause(allowed_ms: float, spent_ms: Mapping[str, float], usual: Mapping[str, float]) -> str:
    """The cause whose time exceeds its share of what is allowed by most.

    Args:
        allowed_ms: by the objective.
        spent_ms: by cause.
        usual: share of the allowed time that a cause is expected to take; none if it is not named.
    """
    return max(CAUSES, key=lambda name: spent_ms.get(name, 0.0) - allowed_ms * usual.get(name, 0.0))


def causes(
    objective: Objective, receipt: Receipt, times: DecodeTimes, usual: Mapping[str, float]
) -> dict[str, str]:
    """Why each missed objective was missed: objective to cause.

    The first token is owed by the prompt's own computation: a queue, or preemptions, are to blame before it.
    Later tokens are owed by drafting, verification and the rest in the shares they usually have in the cell.

    Args:
        objective: what the request asked for.
        receipt: what it got.
        times: what the cell did from its first token to its last.
        usual: shares of `draft`, `verify` and `other` in the cell's decode time, adding up to 1.
    """
    found = {}
    misses = missed(objective, receipt)
    first_ms = receipt.e2e_ms if receipt.ttft_ms is None else receipt.ttft_ms
    preempted_first_ms, preempted_ms = receipt.preempted_ms
    begun = {
        "queue": receipt.queue_ms,
        "preempt": preempted_first_ms,
        "prefill": max(0.0, first_ms - receipt.queue_ms - preempted_first_ms),
    }
    decode_ms = max(0.0, receipt.e2e_ms - first_ms)
    decoded = _fitted(
        {
            "preempt": preempted_ms,
            "prefill": 1e3 * times.prefill_s,
            "draft": 1e3 * times.draft_s,
            "verify": 1e3 * times.verify_s,
        },
        decode_ms,
    )
    if misses.get("ttft") and objective.ttft_ms is not None:
        found["ttft"] = cause(objective.ttft_ms, begun, {"prefill": 1.0})
    if misses.get("tpot") and objective.tpot_ms is not None and receipt.tpot_ms:
        allowed_ms = objective.tpot_ms * decode_ms / receipt.tpot_ms
        found["tpot"] = cause(allowed_ms, decoded, usual)
    if misses.get("e2e") and objective.e2e_ms is not None:
        spent = {name: begun.get(name, 0.0) + decoded.get(name, 0.0) for name in CAUSES}
        work_ms = begun["prefill"] + decode_ms
        share = begun["prefill"] / work_ms if work_ms else 1.0
        expected = {"prefill": share, **{name: (1.0 - share) * part for name, part in usual.items()}}
        found["e2e"] = cause(objective.e2e_ms, spent, expected)
    return found


def _fitted(spent_ms: dict[str, float], total_ms: float) -> dict[str, float]:
    """The parts of a time, with what none of them explains as `other`.

    With several micro-batches parts overlap, and together may take longer than all: then in proportion.
    """
    known_ms = sum(spent_ms.values())
    scale = total_ms / known_ms if known_ms > total_ms else 1.0
    parts = {name: scale * value for name, value in spent_ms.items()}
    return {**parts, "other": max(0.0, total_ms - known_ms)}
