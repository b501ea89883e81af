"""What came of a simulated run: attainment, goodput, latency by class, and where the time went."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from cluster.stream_messages import Receipt
from cluster.totals import Totals
from simulator.workloads import SimRequest

# Class under which all requests together are reported, and those in their background.
ALL, BACKGROUND = "all", "background"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one request; times in milliseconds. None where it never came that far.

    Attributes:
        kind: its class.
        attained: whether all its objectives were met; AdaServe's criterion where it has only `tpot_ms`.
        num_output: tokens it got.
        ended_s: when it ended.
        is_cut: whether it got fewer than it was to: the context was full before.
        num_steps, num_verified, num_accepted: as in its receipt.
        ttft_ms, tpot_ms, e2e_ms: its latencies.
    """

    kind: str
    attained: bool
    num_output: int = 0
    is_cut: bool = False
    ended_s: float | None = None
    num_steps: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @classmethod
    def of(cls, request: SimRequest, ended: tuple[float, Receipt] | None) -> Outcome:
        """From the receipt and when it came; without one the request missed its objectives."""
        if ended is None:
            return cls(kind=request.kind, attained=False)
        at, receipt = ended
        return cls(
            kind=request.kind,
            attained=_within(receipt.tpot_ms, request.objective.tpot_ms)
            and _within(receipt.ttft_ms, request.objective.ttft_ms)
            and _within(receipt.e2e_ms, request.objective.e2e_ms),
            num_output=receipt.num_output_tokens,
            is_cut=receipt.num_output_tokens < request.num_output,
            ended_s=at,
            num_steps=receipt.num_steps,
            num_verified=receipt.num_verified,
            num_accepted=receipt.num_accepted,
            ttft_ms=receipt.ttft_ms,
            tpot_ms=receipt.tpot_ms,
            e2e_ms=receipt.e2e_ms,
        )


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Mean and percentiles in milliseconds; NaN-free: None without any value."""

    mean: float | None
    p50: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Latency:
        """Of those that are there."""
        held = [value for value in values if value is not None]
        if not held:
            return cls(mean=None, p50=None, p99=None)
        p50, p99 = np.percentile(held, [50, 99]).tolist()
        return cls(mean=float(np.mean(held)), p50=p50, p99=p99)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One class of requests, or all.

    Attributes:
        num_requests: how many came.
        attainment: share that met their objectives.
        goodput_tokens_s: tokens per second of requests that met them; AdaServe's, as `flotilla bench` counts
            it, where they have none but for the time per token.
        goodput_requests_s: vLLM's: such requests per second.
        throughput_tokens_s: tokens per second of all.
        accepted_tokens_s: draft tokens per second that the target accepted, SPIN's goodput: unlike
            throughput without the target's own token of each step.
        accepted_per_step: tokens committed per request and verify step, the target's own included.
        acceptance: share of verified draft tokens that were accepted; None if none were.
        ttft_ms, tpot_ms, e2e_ms: latencies.
    """

    num_requests: int
    attainment: float
    goodput_tokens_s: float
    goodput_requests_s: float
    throughput_tokens_s: float
    accepted_tokens_s: float
    accepted_per_step: float
    acceptance: float | None
    ttft_ms: Latency
    tpot_ms: Latency
    e2e_ms: Latency

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], seconds: float) -> Summary:
        """Over a run of that many seconds."""
        met = [outcome for outcome in outcomes if outcome.attained]
        steps = sum(outcome.num_steps for outcome in outcomes)
        tokens = sum(outcome.num_output for outcome in outcomes)
        verified = sum(outcome.num_verified for outcome in outcomes)
        accepted = sum(outcome.num_accepted for outcome in outcomes)
        return cls(
            num_requests=len(outcomes),
            attainment=len(met) / max(1, len(outcomes)),
            goodput_tokens_s=sum(outcome.num_output for outcome in met) / seconds,
            goodput_requests_s=len(met) / seconds,
            throughput_tokens_s=tokens / seconds,
            accepted_tokens_s=accepted / seconds,
            accepted_per_step=tokens / max(1, steps),
            acceptance=accepted / verified if verified else None,
            ttft_ms=Latency.of(outcome.ttft_ms for outcome in outcomes),
            tpot_ms=Latency.of(outcome.tpot_ms for outcome in outcomes),
            e2e_ms=Latency.of(outcome.e2e_ms for outcome in outcomes),
        )


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a decode iteration went.

    Attributes:
        num_iterations: how many.
        step_ms: mean length.
        draft_ms, verify_ms: of that, waiting for drafts, and for the target's forward.
        other_ms: the rest: messages, scheduling, and waiting for a worker that is busy with something else.
        goodput_tokens_s: SmartSpec's goodput, tokens that iterations committed per second of them.
    """

    num_iterations: int
    step_ms: float
    draft_ms: float
    verify_ms: float
    other_ms: float
    goodput_tokens_s: float

    @classmethod
    def of(cls, totals: Totals) -> StepTimes:
        """From the scheduler's counters."""
        count, seconds = max(1, totals.iterations), totals.step_s
        return cls(
            num_iterations=totals.iterations,
            step_ms=1e3 * seconds / count,
            draft_ms=1e3 * totals.step_draft_s / count,
            verify_ms=1e3 * totals.step_verify_s / count,
            other_ms=1e3 * (seconds - totals.step_draft_s - totals.step_verify_s) / count,
            goodput_tokens_s=totals.step_tokens / seconds if seconds > 0.0 else 0.0,
        )


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a run.

    Attributes:
        system: what served.
        simulated_s: from the start to the last answer.
        classes: by class of request, and under `all`; under `background` those of the background that ended
            until then, which are in no other.
        steps: where the time went.
        num_preemptions, num_rejected, num_unfinished, num_cut: counts. An answer that does not fit into the
            context behind its prompt is cut off, and counts with the tokens that it has. Who was refused, as
            for a prompt that is too long for the cell, or is not served by the end counts as missed, also
            without objectives.
    """

    system: str
    simulated_s: float
    classes: dict[str, Summary]
    steps: StepTimes
    num_preemptions: int = 0
    num_rejected: int = 0
    num_unfinished: int = 0
    num_cut: int = 0

    @property
    def all(self) -> Summary:
        """All classes together."""
        return self.classes[ALL]

    @classmethod
    def of(
        cls,
        system: str,
        outcomes: Sequence[Outcome],
        totals: Totals,
        num_rejected: int,
        background: Sequence[Outcome] = (),
    ) -> RunResult:
        """Sum a run up."""
        ended = [outcome.ended_s for outcome in outcomes if outcome.ended_s is not None]
        seconds = max(ended, default=1e-9)
        classes = {ALL: Summary.of(outcomes, seconds)}
        for kind in sorted({outcome.kind for outcome in outcomes}):
            classes[kind] = Summary.of([o for o in outcomes if o.kind == kind], seconds)
        # The run goes on for a moment after the last answer; what ends then is of no second that counts.
        beside = [outcome for outcome in background if (outcome.ended_s or 0.0) <= seconds]
        if beside:
            classes[BACKGROUND] = Summary.of(beside, seconds)
        return cls(
            system=system,
            simulated_s=seconds,
            classes=classes,
            steps=StepTimes.of(totals),
            num_preemptions=totals.preemptions,
            num_rejected=num_rejected,
            num_unfinished=len(outcomes) - len(ended) - num_rejected,
            num_cut=sum(outcome.is_cut for outcome in outcomes),
        )


def _within(value: float | None, limit: float | None) -> bool:
    """Whether a latency meets its objective; a request too short to have the latency does."""
    return limit is None or value is None or value <= limit
