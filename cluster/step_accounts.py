"""Sums of what a scheduler's steps took and did, for benchmarks that take the difference of two."""

from __future__ import annotations

from cluster.core import SchedulerCore


def step_accounts(core: SchedulerCore) -> dict[str, float]:
    """Counts, tokens and seconds since the scheduler began, by name."""
    totals = core.totals
    return {
        "steps": totals.steps,
        "iterations": totals.iterations,
        "step_s": totals.step_s,
        "step_draft_s": totals.step_draft_s,
        "step_verify_s": totals.step_verify_s,
        "forward_s": totals.forward_s,
        "draft_forward_s": totals.draft_forward_s,
        "drafted": totals.drafted_tokens,
        "verified": totals.verified_tokens,
        "accepted": totals.accepted_tokens,
        "committed": totals.committed_tokens,
        "preemptions": totals.preemptions,
        "switches": core.pool.num_switches,
        **{f"calls_{n}": count for n, count in core.micro_batches.calls_by_count.items()},
    }
