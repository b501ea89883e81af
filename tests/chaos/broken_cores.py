"""Scheduler cores with one fault each, which the fault search must find."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cluster.config import FlotillaConfig
from cluster.core import SchedulerCore
from cluster.cost_model import CostModel
from cluster.events import (
    Action,
    ClientLost,
    Draft,
    DraftDone,
    DrafterDraining,
    Emit,
    Event,
    Tick,
    WorkerLost,
)
from cluster.policies.base import Policy
from cluster.requests import Request, State
from cluster.stream_messages import TokenEvent
from drafters.messages import DraftCall
from verifier.messages import Verdict, VerifyResult

__all__ = ["BROKEN"]


class LosesToken(SchedulerCore):
    """Drops the last of many tokens of a step."""

    def _commit(self, request: Request, verdict: Verdict, now: float) -> None:
        if len(verdict.tokens) > 3:
            verdict = msgspec.structs.replace(verdict, tokens=verdict.tokens[:-1])
        super()._commit(request, verdict, now)


class RepeatsTokens(SchedulerCore):
    """Sends the events of a step again where the step was a long one."""

    def handle(self, event: Event, now: float) -> list[Action]:
        actions = super().handle(event, now)
        twice = [Emit(a.client, [*a.events, *a.events]) for a in actions if isinstance(a, Emit)]
        others = [action for action in actions if not isinstance(action, Emit)]
        return [*others, *twice] if len(twice) == 1 else actions


class LeaksSlots(SchedulerCore):
    """Does not tell the target of requests that are cancelled in a call."""

    def _cancel(self, request_id: str, now: float) -> None:
        request = self.requests.get(request_id)
        if request is not None and request.state is State.VERIFYING:
            request.opened = False
        super()._cancel(request_id, now)


class EndsTwice(SchedulerCore):
    """Tells the end of a cancelled request twice."""

    def _cancel(self, request_id: str, now: float) -> None:
        request = self.requests.get(request_id)
        super()._cancel(request_id, now)
        if request is not None:
            position = len(request.output)
            end = TokenEvent(request_id=request_id, position=position, tokens=[], finish_reason="cancelled")
            self.table.tell(request, end)


class ForgetsRunning(SchedulerCore):
    """Forgets requests whose prefill is under way when the target dies."""

    def _worker_lost(self, name: str, now: float) -> None:
        if name == "verifier":
            for request in [r for r in self.running.values() if r.state is State.PREFILL_SENT]:
                self.table.leave(request, now)
        super()._worker_lost(name, now)


class WaitsForever(SchedulerCore):
    """Does not look whether a drafter is late."""

    def handle(self, event: Event, now: float) -> list[Action]:
        return [] if isinstance(event, Tick) else super().handle(event, now)


class WaitsForTheDead(SchedulerCore):
    """Goes on waiting for the draft of a drafter that died."""

    def _worker_lost(self, name: str, now: float) -> None:
        if name == "verifier":
            super()._worker_lost(name, now)
        else:
            self.planner.drafter_lost(name, self.requests.values())


class CallsTheDead(SchedulerCore):
    """Sends a call to a drafter that has just died."""

    def handle(self, event: Event, now: float) -> list[Action]:
        actions = super().handle(event, now)
        if isinstance(event, WorkerLost) and event.name != "verifier":
            actions.append(Draft(event.name, DraftCall(call_id=1 << 30, items=[])))
        return actions


class TrustsDrafters(SchedulerCore):
    """Takes drafts as they come."""

    def _draft_done(self, event: DraftDone, now: float) -> None:
        for draft in event.result.drafts:
            request = self.requests.get(draft.request_id)
            if request is not None and request.awaits(event.result.call_id):
                request.drafted(draft.tree)
        super()._draft_done(event, now)


class KeepsDraining(SchedulerCore):
    """Goes on using drafters that are to be given up."""

    def handle(self, event: Event, now: float) -> list[Action]:
        return [] if isinstance(event, DrafterDraining) else super().handle(event, now)


class OverlooksClients(SchedulerCore):
    """Goes on serving front ends that are gone."""

    def handle(self, event: Event, now: float) -> list[Action]:
        return [] if isinstance(event, ClientLost) else super().handle(event, now)


class TakesStaleAnswers(SchedulerCore):
    """Takes any answer of the target for the one that it waits for."""

    def _verify_done(self, result: VerifyResult, now: float) -> None:
        outstanding = self.verify_calls.outstanding
        if outstanding is not None:
            result = msgspec.structs.replace(result, call_id=outstanding.call_id)
        super()._verify_done(result, now)


class RejectsNobody(SchedulerCore):
    """Its queue has no bound."""

    def __init__(self, config: FlotillaConfig, policy: Policy, cost: CostModel) -> None:
        super().__init__(config, policy, cost)
        scheduler = config.scheduler.model_copy(update={"max_waiting": 1 << 20})
        self.door.config = config.model_copy(update={"scheduler": scheduler})


class StarvesTheLast(SchedulerCore):
    """Sends the prompt of the latest request to the target again and again."""

    def _verify_done(self, result: VerifyResult, now: float) -> None:
        super()._verify_done(result, now)
        if len(self.running) > 1:
            self._preempt(max(self.running.values(), key=lambda request: request.order))


#: By name: each has one fault, and is like the real core otherwise.
BROKEN: Sequence[type[SchedulerCore]] = (
    LosesToken,
    RepeatsTokens,
    LeaksSlots,
    EndsTwice,
    ForgetsRunning,
    WaitsForever,
    WaitsForTheDead,
    CallsTheDead,
    TrustsDrafters,
    KeepsDraining,
    OverlooksClients,
    TakesStaleAnswers,
    RejectsNobody,
    StarvesTheLast,
)
