"""What servers say about speculation in their responses, added up over a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ReceiptSummary:
    """Speculation over many requests, from `metrics` (vLLM's field names).

    Attributes:
        num_receipts: responses that carried one.
        num_steps: verification steps.
        num_drafted, num_verified, num_accepted: draft tokens, those of them sent to the target, and those
            it kept. Servers that verify all they draft name only the first.
        mean_acceptance_length: tokens per step, counting the target's own; weighted by steps.
        acceptance_rate: accepted over verified tokens.
        drafters: accepted tokens by drafter.
    """

    num_receipts: int
    num_steps: int
    num_drafted: int
    num_verified: int
    num_accepted: int
    mean_acceptance_length: float | None
    acceptance_rate: float | None
    drafters: dict[str, int]


def speculation_of(metrics: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The speculation part of a response's metrics, if it has one."""
    part = (metrics or {}).get("speculative_decoding")
    return part if isinstance(part, Mapping) else None


def drafters_of(metrics: Mapping[str, Any] | None) -> dict[str, int]:
    """Accepted tokens by drafter; a plain list of names counts no tokens."""
    drafters = (metrics or {}).get("drafters") or (speculation_of(metrics) or {}).get("drafters") or {}
    if isinstance(drafters, Mapping):
        return {str(name): int(accepted) for name, accepted in drafters.items()}
    return {str(name): 0 for name in drafters}


def summarise_receipts(metrics: Sequence[Mapping[str, Any]]) -> ReceiptSummary | None:
    """Totals over responses; None if no response says anything."""
    parts = [part for part in map(speculation_of, metrics) if part is not None]
    if not parts:
        return None
    steps = sum(part.get("num_spec_steps") or 0 for part in parts)
    drafted = sum(part.get("num_draft_tokens") or 0 for part in parts)
    verified = sum(part.get("num_verified_tokens", part.get("num_draft_tokens")) or 0 for part in parts)
    accepted = sum(part.get("num_accepted_draft_tokens") or 0 for part in parts)
    drafters: dict[str, int] = {}
    for entry in metrics:
        for name, count in drafters_of(entry).items():
            drafters[name] = drafters.get(name, 0) + count
    return ReceiptSummary(
        num_receipts=len(parts),
        num_steps=steps,
        num_drafted=drafted,
        num_verified=verified,
        num_accepted=accepted,
        mean_acceptance_length=sum(map(_committed, parts)) / steps if steps else None,
        acceptance_rate=accepted / verified if verified else None,
        drafters=dict(sorted(drafters.items(), key=lambda item: -item[1])),
    )


def _committed(part: Mapping[str, Any]) -> float:
    """Tokens that the steps of a response committed.

    That is a token for each besides the accepted ones, unless its server says otherwise: where an accepted
    path ends with a stop token, the target adds none.
    """
    steps, length = part.get("num_spec_steps") or 0, part.get("mean_acceptance_length")
    if length is not None:
        return float(length) * steps
    return steps + float(part.get("num_accepted_draft_tokens") or 0)
