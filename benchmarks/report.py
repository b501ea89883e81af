"""From outcomes to figures: latency percentiles, throughput, attainment and both goodputs, by class.

Two goodputs are in use, and differ: requests per second that met all their objectives (DistServe, vLLM),
and tokens per second of requests whose mean time per output token met its objective (AdaServe).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.load_client import LoadResult, Outcome
from benchmarks.objectives import METRICS
from benchmarks.receipts import ReceiptSummary, summarise_receipts

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles of one latency, in milliseconds; None without samples."""

    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        """Of a sample, with linear interpolation between order statistics."""
        if not values:
            return cls(None, None, None, None, None)
        sample = np.asarray(values, dtype=np.float64)
        return cls(float(sample.mean()), *(float(p) for p in np.percentile(sample, PERCENTILES)))


@dataclass(frozen=True, slots=True)
class ClassReport:
    """Figures of one class of requests, or of all.

    Attributes:
        domain: the class; "total" for all.
        num_requests, num_errors: how many were sent, and how many of those failed.
        num_output_tokens: tokens of the answers.
        ttft, tpot, e2e: latencies of completed requests.
        requests_per_s, tokens_per_s: completed work over the run's duration.
        num_with_slo: requests that carry an objective.
        attainment: share of those that met all of theirs (a failed one did not); None for none.
        attainment_tpot: share of requests with an objective for time per output token that met it.
        goodput_requests_per_s: completed requests that met all their objectives, per second.
        goodput_tokens_per_s: tokens of completed requests whose mean time per output token met its
            objective, per second.
        receipts: the server's own account, where it gives one.
    """

    domain: str
    num_requests: int
    num_errors: int
    num_output_tokens: int
    ttft: Distribution
    tpot: Distribution
    e2e: Distribution
    requests_per_s: float
    tokens_per_s: float
    num_with_slo: int
    attainment: float | None
    attainment_tpot: float | None
    goodput_requests_per_s: float
    goodput_tokens_per_s: float
    receipts: ReceiptSummary | None


def meets(outcome: Outcome, metric: str) -> bool:
    """Whether a completed request met one objective; without that objective, or without that latency
    (one token has no time per output token), there is nothing to miss."""
    limit = getattr(outcome.request.slo, f"{metric}_ms")
    value = getattr(outcome, f"{metric}_ms")
    return outcome.is_ok and (limit is None or value is None or value <= limit)


def meets_all(outcome: Outcome) -> bool:
    """Whether a request completed and met all its objectives."""
    return all(meets(outcome, metric) for metric in METRICS)


def _share(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None


def summarise(domain: str, outcomes: Sequence[Outcome], duration_s: float) -> ClassReport:
    """The figures of some outcomes of a run that took `duration_s`."""
    done = [outcome for outcome in outcomes if outcome.is_ok]
    with_slo = [outcome for outcome in outcomes if not outcome.request.slo.is_empty]
    with_tpot = [outcome for outcome in outcomes if outcome.request.slo.tpot_ms is not None]
    tokens = sum(outcome.num_output_tokens for outcome in done)
    good_tokens = sum(outcome.num_output_tokens for outcome in done if meets(outcome, "tpot"))
    per_s = 1.0 / duration_s if duration_s > 0 else 0.0
    return ClassReport(
        domain=domain,
        num_requests=len(outcomes),
        num_errors=len(outcomes) - len(done),
        num_output_tokens=tokens,
        ttft=Distribution.of([o.ttft_ms for o in done if o.ttft_ms is not None]),
        tpot=Distribution.of([o.tpot_ms for o in done if o.tpot_ms is not None]),
        e2e=Distribution.of([o.e2e_ms for o in done if o.e2e_ms is not None]),
        requests_per_s=len(done) * per_s,
        tokens_per_s=tokens * per_s,
        num_with_slo=len(with_slo),
        attainment=_share([meets_all(outcome) for outcome in with_slo]),
        attainment_tpot=_share([meets(outcome, "tpot") for outcome in with_tpot]),
        goodput_requests_per_s=sum(meets_all(outcome) for outcome in done) * per_s,
        goodput_tokens_per_s=good_tokens * per_s,
        receipts=summarise_receipts([o.metrics for o in done if o.metrics is not None]),
    )


@dataclass(frozen=True, slots=True)
class RunReport:
    """Figures of a run.

    Attributes:
        total: over all requests.
        by_class: by class, in alphabetical order.
        duration_s: from the start to the last answer.
        client_cpu_share: processor time of the load generator over wall time (1 is a whole core).
        client_parse_ms_p99: time the client spent on one request's stream.
        send_lag_ms_p99: how late requests were sent.
        errors: how often each error occurred.
    """

    total: ClassReport
    by_class: list[ClassReport]
    duration_s: float
    client_cpu_share: float
    client_parse_ms_p99: float | None
    send_lag_ms_p99: float | None
    errors: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Plain data for a JSON file."""
        return asdict(self)


def report(result: LoadResult) -> RunReport:
    """All figures of a run."""
    outcomes = result.outcomes
    domains = sorted({outcome.request.domain for outcome in outcomes})
    errors: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.error:
            errors[outcome.error] = errors.get(outcome.error, 0) + 1
    return RunReport(
        total=summarise("total", outcomes, result.duration_s),
        by_class=[
            summarise(domain, [o for o in outcomes if o.request.domain == domain], result.duration_s)
            for domain in domains
        ],
        duration_s=result.duration_s,
        client_cpu_share=result.client_cpu_share,
        client_parse_ms_p99=Distribution.of([o.parse_s * 1000.0 for o in outcomes]).p99,
        send_lag_ms_p99=Distribution.of([o.lag_ms for o in outcomes]).p99,
        errors=errors,
    )


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """One request's record for a JSON file."""
    return {
        "index": outcome.request.index,
        "domain": outcome.request.domain,
        "arrival_s": outcome.request.arrival_s,
        "max_tokens": outcome.request.max_tokens,
        "slo": asdict(outcome.request.slo),
        "sent_s": outcome.sent_s,
        "lag_ms": outcome.lag_ms,
        "ttft_ms": outcome.ttft_ms,
        "tpot_ms": outcome.tpot_ms,
        "e2e_ms": outcome.e2e_ms,
        "chunk_ms": outcome.chunk_ms,
        "num_prompt_tokens": outcome.num_prompt_tokens,
        "num_output_tokens": outcome.num_output_tokens,
        "finish_reason": outcome.finish_reason,
        "met": meets_all(outcome),
        "error": outcome.error,
        "metrics": outcome.metrics,
    }
