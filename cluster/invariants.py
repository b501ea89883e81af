"""Whether the scheduler's books balance; for tests, the fault search, and whoever doubts."""

from __future__ import annotations

from cluster.core import SchedulerCore
from cluster.requests import Request, State


def check_invariants(core: SchedulerCore) -> None:
    """Raise AssertionError where the books do not balance; holds after every event."""
    assert all(r.state is State.WAITING for r in core.waiting)
    assert all(r.is_running for r in core.running.values())
    assert len(core.waiting) + len(core.running) == len(core.requests)
    assert not any(r.opened or r.num_computed for r in core.waiting), "the target holds one that waits"
    scheduler = core.config.scheduler
    assert len(core.running) <= scheduler.max_running, "more run than may"
    assert len(core.requests) <= scheduler.max_running + scheduler.max_waiting, "the queue is not bounded"
    promises = core.door.promises
    assert len(promises) <= promises.most, "what clients were told is not bounded"
    _check_calls(core)
    _check_drafters(core)
    _check_target(core)


def _check_calls(core: SchedulerCore) -> None:
    calls = core.verify_calls.all_outstanding
    assert len(calls) <= 2, "more than one call waits at the target"
    assert not any(call.is_ahead for call in calls[:1]), "nothing is there that the call is ahead of"
    in_call: set[str] = set()
    for call in calls:
        in_call |= call.trees.keys() | call.prefilling.keys()
    for request in core.running.values():
        if request.state in (State.VERIFYING, State.PREFILL_SENT):
            assert request.request_id in in_call


def _check_drafters(core: SchedulerCore) -> None:
    served: dict[str, set[str]] = {name: set() for name in core.pool.drafters}
    for request in core.requests.values():
        if request.drafter:
            assert request.drafter in served, f"{request.request_id} has a drafter that is gone"
            served[request.drafter].add(request.request_id)
        assert request.state is not State.DRAFTING or _awaits_answer(core, request), "a draft never comes"
    for drafter in core.pool.drafters.values():
        assert drafter.served == served[drafter.name]
        assert len(drafter.served) <= drafter.max_requests, f"{drafter.name} serves more than it can"
        assert drafter.known <= core.requests.keys()
        assert drafter.reading <= drafter.known


def _awaits_answer(core: SchedulerCore, request: Request) -> bool:
    calls = [drafter.outstanding.get(request.draft_call) for drafter in core.pool.drafters.values()]
    return any(call is not None and request.request_id in call.request_ids for call in calls)


def _check_target(core: SchedulerCore) -> None:
    if core.verifier is None:
        assert not core.running, "requests run without a target"
        assert core.verify_calls.outstanding is None
        return
    held = sum(request.num_computed for request in core.running.values())
    assert core.free_slots + held <= core.verifier.num_slots, "more KV slots than there are"
    if core.requests and core.verify_calls.outstanding is None:
        drafting = any(request.state is State.DRAFTING for request in core.running.values())
        assert drafting, "idle with work at hand"


def check_at_rest(core: SchedulerCore) -> None:
    """Raise AssertionError unless nothing is left of any request: what stays would add up."""
    assert core.is_idle, "requests are left"
    if core.verifier is not None:
        assert core.free_slots == core.verifier.num_slots, "what requests had that ended counts as taken"
    assert not core.waiting
    assert not core.running
    assert not core.planner._views, "plans of requests that ended"
    assert not core.planner.heads._plans, "plans of requests that ended"
    assert not core.pool._begun, "selectors were not told of an end"
    assert not core.pool.acceptance._live, "estimates of requests that ended"
    assert not core.micro_batches._began, "iterations of requests that ended"
    assert not core.micro_batches._draft_s, "drafts of requests that ended"
    switching = core.pool.switching
    for switches in (switching._prepared, switching._waits, switching._ask_at):
        assert not switches, "switches of requests that ended"
    for drafter in core.pool.drafters.values():
        for held in (drafter.served, drafter.known, drafter.reading):
            assert not held, f"{drafter.name} has requests that ended"
