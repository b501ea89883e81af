"""The `metrics` object beside `usage`: what the request attained, under vLLM's names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from cluster.stream_messages import Objective, Receipt


@dataclass(frozen=True)
class ChoiceOutcome:
    """What is known about one finished choice.

    Times are the cell's where its receipt covers the whole request, else the front end's own (after a
    resubmission, or when the receipt was lost).

    Attributes:
        num_prompt_tokens, num_output_tokens: token counts; tokens after a stop string do not count.
        receipt: the cell's account, if it arrived.
        ttft_ms, e2e_ms: time to the first and to the last token.
        tpot_ms: mean time per output token after the first; None below two tokens.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    receipt: Receipt | None
    ttft_ms: float | None
    e2e_ms: float
    tpot_ms: float | None


def usage(outcomes: Sequence[ChoiceOutcome], num_prompts: int) -> dict[str, Any]:
    """OpenAI's token counts; each prompt is counted once, however many choices it has."""
    choices = max(1, len(outcomes) // num_prompts)
    prompt = sum(outcome.num_prompt_tokens for outcome in outcomes[::choices])
    completion = sum(outcome.num_output_tokens for outcome in outcomes)
    cached = sum(outcome.receipt.num_cached_tokens for outcome in outcomes[::choices] if outcome.receipt)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": min(cached, prompt)},
    }


def metrics(outcomes: Sequence[ChoiceOutcome], objective: Objective, seed: int) -> dict[str, Any]:
    """The receipt of a request; of several choices, times are the worst and counts the sum."""
    ttft_ms = _worst(outcome.ttft_ms for outcome in outcomes)
    tpot_ms = _worst(outcome.tpot_ms for outcome in outcomes)
    e2e_ms = max(outcome.e2e_ms for outcome in outcomes)
    generation_ms = None if ttft_ms is None else max(0.0, e2e_ms - ttft_ms)
    tokens = sum(outcome.num_output_tokens for outcome in outcomes)
    receipts = [outcome.receipt for outcome in outcomes if outcome.receipt is not None]
    drafters: Counter[str] = Counter()
    for receipt in receipts:
        drafters.update(receipt.drafters)
    return {
        "time_to_first_token_ms": _rounded(ttft_ms),
        "generation_time_ms": _rounded(generation_ms),
        "queue_time_ms": _rounded(_worst(receipt.queue_ms for receipt in receipts)),
        "mean_itl_ms": _rounded(tpot_ms),
        "tpot_ms": _rounded(tpot_ms),
        "e2e_ms": _rounded(e2e_ms),
        "tokens_per_second": _rounded(1000 * tokens / e2e_ms) if e2e_ms > 0 else None,
        "slo": _attainment(objective, ttft_ms, tpot_ms),
        "speculative_decoding": _speculation(receipts),
        "drafters": dict(drafters),
        "num_preemptions": sum(receipt.num_preemptions for receipt in receipts),
        "seed": seed,
    }


def _attainment(objective: Objective, ttft_ms: float | None, tpot_ms: float | None) -> dict[str, Any]:
    """Whether each objective was met; null where there is none, or nothing to measure it by."""

    def met(measured: float | None, bound: float | None) -> bool | None:
        return None if bound is None or measured is None else measured <= bound

    tpot_met, ttft_met = met(tpot_ms, objective.tpot_ms), met(ttft_ms, objective.ttft_ms)
    known = [one for one in (tpot_met, ttft_met) if one is not None]
    return {
        "tpot_ms": objective.tpot_ms,
        "ttft_ms": objective.ttft_ms,
        "met": all(known) if known else None,
        "tpot_met": tpot_met,
        "ttft_met": ttft_met,
    }


def _speculation(receipts: Sequence[Receipt]) -> dict[str, Any]:
    """Draft counters. The mean acceptance length counts the bonus token, as everywhere in the field."""
    steps = sum(receipt.num_steps for receipt in receipts)
    verified = sum(receipt.num_verified for receipt in receipts)
    accepted = sum(receipt.num_accepted for receipt in receipts)
    by_depth = zip_longest(*(receipt.acceptance_by_depth for receipt in receipts), fillvalue=0)
    return {
        "mean_acceptance_length": _rounded(1 + accepted / steps) if steps else None,
        "draft_acceptance_rate": _rounded(accepted / verified) if verified else None,
        "num_spec_steps": steps,
        "num_draft_tokens": sum(receipt.num_drafted for receipt in receipts),
        "num_verified_tokens": verified,
        "num_accepted_draft_tokens": accepted,
        "acceptance_by_depth": [sum(counts) for counts in by_depth],
    }


def _worst(values: Any) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
