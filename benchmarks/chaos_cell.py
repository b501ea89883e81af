"""A cell of the fault search: the scheduler core, its workers, and what is checked after every event."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable

from msgspec.structs import replace

from benchmarks.chaos_clients import Clients
from benchmarks.chaos_corruptions import CORRUPTIONS
from benchmarks.chaos_schedule import (
    NUM_CLIENTS,
    Settings,
)
from benchmarks.chaos_workers import (
    KINDS,
    MAX_TOKENS,
    VOCAB,
    ChaosDrafter,
    ChaosTarget,
    Texts,
    Violation,
    require,
)
from cluster.admission import SLOT_MARGIN
from cluster.config import FlotillaConfig
from cluster.core import SchedulerCore
from cluster.cost_model import DEFAULT_PROFILE, CostModel
from cluster.events import (
    Action,
    ClientLost,
    Draft,
    DraftDone,
    DrafterReady,
    Drained,
    Emit,
    Event,
    Reject,
    VerifierReady,
    Verify,
    VerifyDone,
    WorkerLost,
)
from cluster.invariants import check_invariants
from cluster.policies.base import Policy
from cluster.policies.registry import make_policy

MakeCore = Callable[[FlotillaConfig, Policy, CostModel], SchedulerCore]
TARGET = "verifier"
_EVENT_S = 0.002


class ChaosCell:
    """The core with workers that answer when they are told to, and front ends.

    Attributes:
        settings: of the schedule.
        clients: the front ends.
        core: the scheduler that serves now.
        target: None while it is dead.
        drafters: those alive, by name.
        now: the core's clock.
        counts: what happened, by name.
    """

    def __init__(self, settings: Settings, make: MakeCore = SchedulerCore) -> None:
        self.settings = settings
        self.rng = random.Random(settings.seed)
        self.counts: Counter[str] = Counter()
        self.now = 100.0
        self._make = make
        self._texts = Texts()
        self.clients = Clients(self._texts, NUM_CLIENTS)
        self._start_cell()

    # Cells and their workers

    def _start_cell(self) -> None:
        """A new scheduler with new workers."""
        self.core = self._core_of(self.settings)
        self._cores = {self.settings: self.core}
        self._used = self.settings
        self.target: ChaosTarget | None = None
        self.drafters: dict[str, ChaosDrafter] = {}
        self._kinds: dict[str, str] = {}
        self._dead: list[str] = []
        self._draining: set[str] = set()
        self._drained: set[str] = set()
        self._liars: set[str] = set()
        self._answers: dict[str, deque[Event]] = {}
        self._stale: deque[Event] = deque(maxlen=8)
        self._corruptions: deque[str] = deque()
        self._is_stalled = False
        self._is_draining = False
        self._call_ids: dict[str, int] = {}
        self._start_target()
        for kind in self.settings.drafters:
            self._add_drafter(kind)

    def _core_of(self, settings: Settings) -> SchedulerCore:
        config = FlotillaConfig.model_validate(
            {
                "target": {"path": "unused"},
                "policy": {"name": settings.policy},
                "selector": {"name": settings.selector, "fast_switching": settings.fast_switching},
                "scheduler": {
                    "batching": settings.batching,
                    "micro_batches": settings.micro_batches,
                    "prefill_chunk": settings.prefill_chunk,
                    "max_running": settings.max_running,
                    "max_waiting": settings.max_waiting,
                    "draft_ahead": settings.draft_ahead,
                    "async_scheduling": settings.async_scheduling,
                },
            }
        )
        core = self._make(config, make_policy(config.policy), CostModel(DEFAULT_PROFILE))
        core.sending_ahead.holds_back = settings.holds_back
        return core

    def _start_target(self) -> None:
        self.target = ChaosTarget(
            self._texts,
            self.settings.num_slots,
            has_heads=True,
            has_beams=self.settings.has_beams,
            shares=self.settings.shares,
        )
        self.clients.max_tokens = min(MAX_TOKENS, self.settings.num_slots - SLOT_MARGIN)
        self._is_stalled = False
        self.handle(VerifierReady(self.settings.num_slots, MAX_TOKENS, VOCAB))

    def _add_drafter(self, kind: str) -> None:
        name = f"{kind}/{sum(one == kind for one in self._kinds.values())}"
        self._kinds[name] = kind
        self._start_drafter(name)

    def _start_drafter(self, name: str) -> None:
        kind = self._kinds[name]
        self.drafters[name] = ChaosDrafter(kind, self._texts, self.rng)
        self._liars.discard(name)
        capabilities = KINDS[kind][1]
        if self.settings.has_beams:
            capabilities = replace(capabilities, has_independent_layers=False)
        self.handle(DrafterReady(name, capabilities, self.rng.choice([1, 4, 16]), kind=kind))

    def _lose(self, name: str) -> None:
        """A worker dies; what it had answered may still be somewhere."""
        self._stale.extend(self._answers.pop(name, ()))
        if name == TARGET:
            self.target, self._is_stalled = None, False
        else:
            del self.drafters[name]
        is_drained = name in self._draining
        self._draining.discard(name)
        self._drained.discard(name)
        if not is_drained:
            self._dead.append(name)
        self.handle(WorkerLost(name))

    def _return(self, name: str) -> None:
        self._dead.remove(name)
        if name == TARGET:
            self._start_target()
        else:
            self._start_drafter(name)

    # Events and actions

    def handle(self, event: Event) -> None:
        """Tell the core, do what it says, and look whether all is well."""
        self.now += _EVENT_S
        self.counts["events"] += 1
        drained: list[str] = []
        self._num_waiting = len(self.core.waiting)
        actions = self.core.handle(event, self.now)
        told: set[str] = set()
        for action in actions:
            match action:
                case Drained(name):
                    require(name in self._draining, f"{name} is drained and was not to be")
                    require(name not in self._drained, f"{name} is drained twice")
                    self._drained.add(name)
                    drained.append(name)
                case Emit(client):
                    require(client not in told, "two messages to one front end in one step")
                    told.add(client)
            self._act(action, event)
        for action in self.core.reflect():
            self._act(action, event)
        self._check()
        for name in drained:
            self._lose(name)

    def _act(self, action: Action, event: Event) -> None:
        match action:
            case Draft(name, call):
                require(name in self.drafters, f"a call to the drafter {name}, which is gone")
                require(name not in self._draining, f"a call to the drafter {name}, which drains")
                self._check_call_id(name, call.call_id)
                result = self.drafters[name].draft(call)
                if self._corruptions and any(item.plan.depth for item in call.items):
                    result = CORRUPTIONS[self._corruptions.popleft()](result)
                    self._liars.add(name)
                    self.counts["corrupt drafts"] += 1
                self._answers.setdefault(name, deque()).append(DraftDone(name, result))
            case Verify(call):
                if self.target is None:
                    raise Violation("a call to the target, which is gone")
                self._check_call_id(TARGET, call.call_id)
                answers = self._answers.setdefault(TARGET, deque())
                verified = self.target.step(call)
                answers.append(VerifyDone(verified))
                require(len(answers) <= 2, "more than two calls at the target")
                self.counts["calls ahead"] += any(item.tree is None for item in call.verify)
                self.counts["drafts planned ahead"] += any(item.plan is not None for item in call.verify)
                self.counts["deferred"] += len(verified.deferred)
            case Emit(client, events):
                is_lost = isinstance(event, ClientLost) and event.client == client
                self.clients.sent(client, events, is_lost=is_lost)
            case Reject(client, rejection):
                if rejection.code == "queue_full":
                    # Of several tenants one may have its part of the queue; alone it gets at least half.
                    full = 2 * self._num_waiting >= self.settings.max_waiting
                    require(full, "refused for a full queue that is not full")
                self.counts[f"refused: {rejection.code}"] += 1
                self.clients.rejected(client, rejection)

    def _check_call_id(self, worker: str, call_id: int) -> None:
        require(call_id > self._call_ids.get(worker, 0), f"call {call_id} to {worker} was there before")
        self._call_ids[worker] = call_id

    def _check(self) -> None:
        core = self.core
        check_invariants(core)
        if self.target is not None and core.verifier is not None:
            held = self.target.held.keys()
            known = {r.request_id for r in core.running.values() if r.opened}
            known.update(core.verify_calls._release)
            require(held <= known, f"KV slots are never freed: {sorted(held - known)}")
        for name, drafter in self.drafters.items():
            state = core.pool.drafters.get(name)
            if state is not None and name not in self._liars:
                left = drafter.held.keys() - state.known - set(state.release)
                require(not left, f"{name} is never told to forget {sorted(left)}")
