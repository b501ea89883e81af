"""One scheduler core taking over an idle cell's workers from another, as when the policy is changed."""

from __future__ import annotations

from cluster.core import SchedulerCore


def take_over(core: SchedulerCore, before: SchedulerCore, now: float) -> None:
    """Connect `core`, new or used before, to the workers that `before` has.

    The workers notice nothing: call ids go on, and what they are still to forget, the core that takes over
    tells them. What `core` has learnt it keeps.

    Args:
        core: serves from now on.
        before: served until now, and may take over again later.
        now: the scheduler's clock.

    Raises:
        RuntimeError: while `before` serves a request, waits for a drafter, or has no target.
    """
    if not before.is_idle or before.pool.is_waiting:
        raise RuntimeError("the policy can only be changed while no request is being served")
    if before.verifier is None:
        raise RuntimeError("the policy can only be changed while the target is running")
    if core is before:
        return
    core.handle(before.verifier, now)
    core.free_slots = before.free_slots
    core.is_draining = before.is_draining
    core.verify_calls.take_over(before.verify_calls)
    core.pool.take_over(before.pool)
    core.micro_batches.keep(core.pool.drafters)
