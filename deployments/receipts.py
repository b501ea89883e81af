"""The `metrics` object beside `usage`: what the request attained, under vLLM's names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from cluster.stream_messages import Objective, Receipt
from cluster.tier_config import DEFAULT_TIER


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


def usage(
    outcomes: Sequence[ChoiceOutcome], num_prompts: int, *, num_reasoning: int | None = None
) -> dict[str, Any]:
    """OpenAI's token counts; each prompt is counted once, however many choices it has.

    Args:
        outcomes: of all choices.
        num_prompts: how many prompts they have.
        num_reasoning: tokens of what was thought, of all choices; None where that is not told apart.
    """
    choices = max(1, len(outcomes) // num_prompts)
    prompt = sum(outcome.num_prompt_tokens for outcome in outcomes[::choices])
    completion = sum(outcome.num_output_tokens for outcome in outcomes)
    cached = sum(outcome.receipt.num_cached_tokens for outcome in outcomes[::choices] if outcome.receipt)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": min(cached, prompt)},
    }
    if num_reasoning is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return counts


def metrics(
    outcomes: Sequence[ChoiceOutcome], objective: Objective, seed: int, tier: str = DEFAULT_TIER
) -> dict[str, Any]:
    """The receipt of a request; of several choices, times are the worst and counts the sum.

    Args:
        outcomes: of its choices.
        objective, tier: as asked for; what the cell served it on stands in its own receipts.
        seed: what gives the same text again.
    """
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
        "slo": _attainment(outcomes, objective),
        "predicted": _predicted(receipts),
        "tier": _tiers(receipts, tier),
        "speculative_decoding": _speculation(receipts),
        "drafters": dict(drafters),
        "num_preemptions": sum(receipt.num_preemptions for receipt in receipts),
        "seed": seed,
    }


def _attainment(outcomes: Sequence[ChoiceOutcome], asked: Objective) -> dict[str, Any]:
    """Targets, and whether each was met; null where there is none, or nothing to measure it by.

    Targets are those the request was served on. Where they differ by choice, as multiples do between
    prompts, each choice is held against its own, and the largest is told.
    """
    targets: dict[str, float | None] = {}
    met: dict[str, bool | None] = {}
    for name in ("tpot_ms", "ttft_ms", "e2e_ms"):
        bounds = [getattr(_served(outcome, asked), name) for outcome in outcomes] or [getattr(asked, name)]
        held = [
            getattr(outcome, name) <= bound
            for outcome, bound in zip(outcomes, bounds, strict=False)
            if bound is not None and getattr(outcome, name) is not None
        ]
        targets[name] = _rounded(_worst(bounds))
        met[name.replace("_ms", "_met")] = all(held) if held else None
    known = [one for one in met.values() if one is not None]
    return {**targets, "met": all(known) if known else None, **met}


def _served(outcome: ChoiceOutcome, asked: Objective) -> Objective:
    terms = None if outcome.receipt is None else outcome.receipt.terms
    return asked if terms is None else terms.objective


def _predicted(receipts: Sequence[Receipt]) -> dict[str, float | None] | None:
    """What was predicted on arrival, of several choices the worst; null if nothing was."""
    told = [receipt.predicted for receipt in receipts if receipt.predicted is not None]
    if not told:
        return None
    return {
        "ttft_ms": _rounded(_worst(one.ttft_ms for one in told)),
        "tpot_ms": _rounded(_worst(one.tpot_ms for one in told)),
        "e2e_ms": _rounded(_worst(one.e2e_ms for one in told)),
    }


def _tiers(receipts: Sequence[Receipt], asked: str) -> dict[str, Any]:
    """The tier asked for and the one served; of choices served on several, the last that is not it."""
    served = [receipt.terms.tier for receipt in receipts if receipt.terms is not None]
    lower = [tier for tier in served if tier != asked]
    return {"asked": asked, "served": lower[-1] if lower else asked, "downgraded": bool(lower)}


def server_timing(receipt: Mapping[str, Any]) -> str:
    """The times of a receipt as the value of a `Server-Timing` header (W3C), in milliseconds."""
    parts = (
        ("queue", receipt["queue_time_ms"]),
        ("ttft", receipt["time_to_first_token_ms"]),
        ("decode", receipt["generation_time_ms"]),
        ("total", receipt["e2e_ms"]),
    )
    return ", ".join(f"{name};dur={value:g}" for name, value in parts if value is not None)


def _speculation(receipts: Sequence[Receipt]) -> dict[str, Any]:
    """Draft counters. The mean acceptance length counts the bonus token, as everywhere in the field.

    A step whose accepted path ends with a stop token has none, so that tokens are fewer than steps and
    accepted ones; of a request that was resubmitted they are more, as its steps are those of its last life.
    """
    steps = sum(receipt.num_steps for receipt in receipts)
    committed = sum(
        min(receipt.num_steps + receipt.num_accepted, receipt.num_output_tokens) for receipt in receipts
    )
    verified = sum(receipt.num_verified for receipt in receipts)
    accepted = sum(receipt.num_accepted for receipt in receipts)
    by_depth = zip_longest(*(receipt.acceptance_by_depth for receipt in receipts), fillvalue=0)
    return {
        "mean_acceptance_length": _rounded(committed / steps) if steps else None,
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
