"""Whether the scheduler's books balance; for tests, and for whoever doubts."""

from __future__ import annotations

from cluster.core import SchedulerCore
from cluster.requests import State


def check_invariants(core: SchedulerCore) -> None:
    """Raise AssertionError where the books do not balance."""
    assert all(r.state is State.WAITING for r in core.waiting)
    assert all(r.is_running for r in core.running.values())
    assert len(core.waiting) + len(core.running) == len(core.requests)
    in_call: set[str] = set()
    for sent in core.verify_calls.all_outstanding:
        in_call |= sent.trees.keys() | sent.prefilling
    for request in core.running.values():
        if request.state in (State.VERIFYING, State.PREFILL_SENT):
            assert request.request_id in in_call
    for drafter in core.pool.drafters.values():
        assert drafter.served <= core.requests.keys()
        assert drafter.known <= core.requests.keys()
        assert drafter.reading <= drafter.known
