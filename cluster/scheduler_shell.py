"""The scheduler's shell: turns its actions into messages, and messages into events."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.cell_metrics import CellMetrics
from cluster.cell_stats import CellStats
from cluster.client_server import ClientServer
from cluster.config import FlotillaConfig
from cluster.core import SchedulerCore
from cluster.cost_model import DEFAULT_PROFILE, CostModel
from cluster.events import (
    Action,
    Cancelled,
    ClientLost,
    Draft,
    DraftDone,
    Drained,
    Emit,
    Event,
    Reject,
    RequestArrived,
    Tick,
    Verify,
    VerifyDone,
)
from cluster.linear_cost import LinearCost
from cluster.rank import RankAgreement
from cluster.recorded_core import make_core
from cluster.request_accounts import RequestAccounts
from cluster.step_accounts import step_accounts
from cluster.stream_messages import (
    Cancel,
    CancelMatching,
    ClientMessage,
    NumCancelled,
    Submit,
    TokenBatch,
)
from cluster.succession import take_over
from cluster.timeline import make_timeline
from cluster.worker import VERIFIER
from cluster.worker_set import WorkerSet
from drafters.messages import DraftResult
from engine.wire import Decoder, encode
from selector.protocol import BeginsAnew
from verifier.messages import VerifyResult

_log = logging.getLogger(__name__)


class Cancellable(Protocol):
    """What is to happen, and need not."""

    def cancel(self) -> None:
        """It does not happen any more."""
        ...


class SchedulerShell:
    """The scheduler that serves now, and its messages to and from workers and front ends.

    Args:
        config: the cell.
        metrics: counts what happens.
        lost: told the name of a worker whose connection ended.
        drained: told the name of a drafter that has no requests any more and shall go.
        call_later: has a function called after so many seconds, unless it is cancelled; without it calls that
            could be held back are sent at once.

    Attributes:
        core: the scheduler; another one after `restart` and `change`.
        timeline: who worked when; None unless it is kept.
    """

    def __init__(
        self,
        config: FlotillaConfig,
        metrics: CellMetrics,
        lost: Callable[[str], None],
        drained: Callable[[str], None],
        call_later: Callable[[float, Callable[[], None]], Cancellable] | None = None,
    ) -> None:
        self._metrics = metrics
        self._lost, self._drained = lost, drained
        self._accounts = RequestAccounts(metrics)
        self._load = CellStats()
        self._agreement = RankAgreement()
        self._draft_results: Decoder[DraftResult] = Decoder(DraftResult)
        self._verify_results: Decoder[VerifyResult] = Decoder(VerifyResult)
        self._scheduler_s = self._iteration_s = 0.0
        self._last_verify_at: float | None = None
        self._workers: WorkerSet | None = None
        self._clients: ClientServer | None = None
        self._call_later = call_later
        self._alarm: tuple[float, Cancellable] | None = None
        self.core = self._made(config, CostModel(DEFAULT_PROFILE))
        self._cores: dict[str, SchedulerCore] = {}
        self.timeline = make_timeline(config)

    def connect(self, workers: WorkerSet, clients: ClientServer) -> None:
        """Say where actions go. Both hear of this shell first, so it can only be told afterwards."""
        self._workers, self._clients = workers, clients

    # What the cell asks

    @property
    def scheduler_s(self) -> float:
        """Processor seconds spent scheduling so far."""
        return self._scheduler_s

    def stats(self) -> dict[str, float]:
        """Processor seconds spent scheduling, seconds of whole iterations, and `step_accounts`."""
        times = {"scheduler_s": self._scheduler_s, "iteration_s": self._iteration_s}
        return times | step_accounts(self.core)

    def load(self) -> dict[str, float]:
        """The cell's load in numbers, as of `CellStats`."""
        return self._load.measure(self.core, time.monotonic())

    def restart(self, config: FlotillaConfig, cost: CostModel) -> None:
        """Begin with a scheduler that knows nothing but costs."""
        self.core = self._made(config, cost)

    def change(self, before: FlotillaConfig, after: FlotillaConfig) -> None:
        """Go on with the scheduler of another configuration, with what it had learnt when it served.

        Raises:
            RuntimeError: while a request is being served, or the target is not there.
        """
        key, old = after.model_dump_json(), self.core
        core = self._cores.get(key) or self._made(after, CostModel(old.cost.profile))
        take_over(core, old, time.monotonic())
        self._cores |= {before.model_dump_json(): old, key: core}
        self.core = core

    # What workers' lives need (`lifecycle.Shell`)

    def restarted(self, name: str) -> None:
        """A worker is made again."""
        if name == VERIFIER:
            self._agreement = RankAgreement()
        self._metrics.restarted(name)

    def learn_cost(self, kind: str, cost: LinearCost) -> None:
        """What a drafter that is new, or has other weights, costs, for every scheduler that may serve.

        Nor does it say anything of these how often others under its name were right.
        """
        for core in {id(core): core for core in (self.core, *self._cores.values())}.values():
            core.cost.learn(kind, cost)
            core.pool.costs.forget(kind)
            core.pool.acceptance.begin_anew(kind)
            core.planner.calibration.forget(kind)
            if isinstance(core.pool.selector, BeginsAnew):
                core.pool.selector.begin_anew(kind)

    # Events and actions

    def handle(self, event: Event) -> None:
        """Tell the scheduler, and do what it says.

        First what workers wait for: where a drafter is within this process its answer is at hand, and the
        target has its next call before clients are told of the last.
        """
        events = deque([event])
        while events:
            others: list[Action] = []
            drafted = list[tuple[str, DraftResult]]()
            while events:
                event = events.popleft()
                if isinstance(event, DraftDone):
                    drafted.append((self.core.pool.kind_of(event.drafter), event.result))
                others += self._call(self._decide(event), events)
            self._tell(others)
            for kind, result in drafted:
                # A drafter may answer anything, also trees that lack their root.
                num_drafted = sum([max(0, len(draft.tree.token) - 1) for draft in result.drafts])
                self._metrics.drafted(kind, result.seconds, num_drafted)
            for grown in self.core.planned_ahead.take_grown():
                self._metrics.drafted(grown.kind, grown.seconds, grown.num_drafted)
            # What could wait until the actions were sent.
            begun = time.thread_time()
            reading = self.core.reflect()
            self._scheduler_s += time.thread_time() - begun
            if self.timeline is not None:
                self.timeline.sent(reading, self.core, time.monotonic())
            self._tell(self._call(reading, events))
        if self.core.is_idle:  # the last request was given up between two answers
            self._last_verify_at = None
        self._set_alarm(self.core.sending_ahead.held_until)

    def _made(self, config: FlotillaConfig, cost: CostModel) -> SchedulerCore:
        core = make_core(config, cost, goes_on=True)
        core.sending_ahead.holds_back = self._call_later is not None
        return core

    def _set_alarm(self, at: float | None) -> None:
        """The scheduler is to be asked again then, or only when something happens."""
        if self._alarm is not None:
            if self._alarm[0] == at:
                return
            self._alarm[1].cancel()
            self._alarm = None
        if at is not None and self._call_later is not None:
            self._alarm = at, self._call_later(max(0.0, at - time.monotonic()), self._woken)

    def _woken(self) -> None:
        self._alarm = None
        self.handle(Tick())

    def _decide(self, event: Event) -> Sequence[Action]:
        # Processor time of this thread: waiting for a core that others hold is not the scheduler's work.
        begun = time.thread_time()
        now = time.monotonic()
        actions = self.core.handle(event, now)
        self._scheduler_s += time.thread_time() - begun
        if self.timeline is not None:
            self.timeline.handled(event, actions, self.core, now, time.monotonic())
        return actions

    def _call(self, actions: Sequence[Action], answered: deque[Event]) -> list[Action]:
        """Send calls, and note answers that are at hand; the other actions."""
        others: list[Action] = []
        for action in actions:
            match action:
                case Draft(name, call):
                    workers = self._connected()[0]
                    if any(item.plan.depth for item in call.items):
                        workers.cores.drafted()
                    result = workers.send_draft(name, call)
                    if result is not None:
                        answered.append(DraftDone(name, result))
                case Verify(call):
                    workers = self._connected()[0]
                    workers.send_verify(encode(call))
                    workers.cores.sent(is_ahead=self.core.planned_ahead.calls.ahead is not None)
                    self._metrics.verify_sent(call, self.core)
                case _:
                    others.append(action)
        return others

    def _tell(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Drained(name):
                    self._drained(name)
                case Emit(client, events):
                    self._connected()[1].send(client, TokenBatch(events))
                    self._accounts.told(events, self.core)
                    self._load.told(events)
                case Reject(client, rejection):
                    self._accounts.rejected(rejection)
                    self._connected()[1].send(client, rejection)

    def _connected(self) -> tuple[WorkerSet, ClientServer]:
        workers, clients = self._workers, self._clients
        if workers is None or clients is None:
            raise RuntimeError("the scheduler's shell is not connected: there is nobody to tell its actions")
        return workers, clients

    # Messages of front ends (`ClientServer`)

    def told(self, client: str, message: ClientMessage) -> None:
        """A front end asks for something."""
        match message:
            case Submit():
                self._accounts.arrived(message)
                self.handle(RequestArrived(message, client))
                self._accounts.looked_at(message, self.core)
            case Cancel(request_id, is_complete, is_moved):
                if is_moved:
                    self._accounts.moved(request_id)
                if is_complete:
                    self._accounts.completed(request_id)
                self.handle(Cancelled(request_id))
            case CancelMatching(ticket, prefix):
                found = [name for name in self.core.requests if prefix and name.startswith(prefix)]
                for name in found:
                    self.handle(Cancelled(name))
                if self._clients is not None:
                    self._clients.send(client, NumCancelled(ticket, len(found)))

    def left(self, client: str) -> None:
        """A front end is gone, and its requests with it."""
        self.handle(ClientLost(client))

    # Messages of workers (`worker_set.Listener`)

    def drafted(self, name: str, data: bytes) -> None:
        """A drafter answered."""
        self.handle(DraftDone(name, self._draft_results.decode(data)))

    def verified(self, rank: int, data: bytes) -> None:
        """A rank of the target answered; what counts is rank 0's, unless ranks are known to disagree."""
        result = self._verify_results.decode(data)
        if not self._agreement.holds(result.call_id, result.digest) and self._workers is not None:
            _log.error("ranks disagree on call %d; rebuilding the target", result.call_id)
            self._workers.kill_target()
            return  # nobody knows who is right: its requests are computed again
        if rank:
            return
        now, last = time.monotonic(), self._last_verify_at
        elapsed_s = None if last is None else now - last
        self._iteration_s += elapsed_s or 0.0
        self._metrics.verified(result, elapsed_s)
        self.handle(VerifyDone(result))
        self._last_verify_at = None if self.core.is_idle else now

    def lost(self, name: str) -> None:
        """A worker's connection ended."""
        self._lost(name)
