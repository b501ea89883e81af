"""What a comparison measures first, without speculation: baseline latency and saturation throughput."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from benchmarks.compare_cell import WarmCell
from benchmarks.compare_workload import Traffic, warmup_requests
from benchmarks.load_client import Outcome
from benchmarks.objectives import Slo
from benchmarks.serve import baseline_latency, by_domain
from benchmarks.workload import BenchRequest

# Enough requests to fill the batch so often.
SATURATION_ROUNDS = 2


def baseline_requests(traffic: Traffic, each: int) -> list[BenchRequest]:
    """So many requests of each class."""
    sample = warmup_requests(traffic, 24 * (each + 1), seed=0)
    return by_domain(sample, each)


def measure_baseline(
    cell: WarmCell, requests: Sequence[BenchRequest], advance: Callable[[Outcome], None]
) -> dict[str, Slo]:
    """Latencies by class, one request at a time: AdaServe's "system load close to zero"."""
    cell.load(by_domain(requests, 1), max_concurrency=1)
    return baseline_latency(cell.load(requests, max_concurrency=1, on_done=advance).outcomes)


def saturation_requests(traffic: Traffic, concurrency: int) -> list[BenchRequest]:
    """Requests that keep a closed loop of `concurrency` full."""
    return warmup_requests(traffic, SATURATION_ROUNDS * concurrency, seed=1)


def measure_saturation(
    cell: WarmCell,
    requests: Sequence[BenchRequest],
    concurrency: int,
    advance: Callable[[Outcome], None],
) -> float:
    """Requests per second that a closed loop of `concurrency` sustains, from tokens in its middle part.

    That is from the first completion, when the batch is full and prompts and decoding are mixed, to the
    start of the last request, after which the batch empties.
    """
    arrived: list[tuple[float, int]] = []
    ended: list[float] = []

    def on_done(outcome: Outcome) -> None:
        ended.append(time.perf_counter())
        advance(outcome)

    result = cell.load(
        requests,
        max_concurrency=concurrency,
        on_done=on_done,
        on_tokens=lambda count: arrived.append((time.perf_counter(), count)),
    )
    done = [outcome for outcome in result.outcomes if outcome.is_ok]
    if not done:
        raise RuntimeError(f"no saturation throughput: {result.outcomes[0].error}")
    # The last request starts when all but `concurrency` have ended.
    first, last = ended[0], ended[max(0, len(ended) - concurrency)]
    tokens = sum(count for moment, count in arrived if first < moment <= last)
    if not tokens:
        return len(done) / result.duration_s
    tokens_each = sum(outcome.num_output_tokens for outcome in done) / len(done)
    return tokens / (last - first) / tokens_each
