"""One cell, simulated: requests arrive, the scheduler core decides, simulated workers answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from cluster.core import SchedulerCore
from cluster.cost_model import CostModel, CostProfile
from cluster.events import (
    Action,
    Draft,
    DraftDone,
    DrafterReady,
    Emit,
    Event,
    Reject,
    RequestArrived,
    Tick,
    VerifierReady,
    Verify,
    VerifyDone,
)
from cluster.policies.registry import make_policy
from cluster.recorded_core import RecordedCore
from cluster.stream_messages import Receipt, Submit
from drafters.heads_drafter import HeadsDrafter
from drafters.protocol import Capabilities
from engine.sampling_params import SamplingParams
from selector.own import CheckedSelector
from simulator.acceptance import AcceptanceModel, load_fitted
from simulator.clock import EventClock
from simulator.hardware import HardwareProfile, Trips
from simulator.machine import Machine
from simulator.metrics import Outcome, RunResult
from simulator.noise import bits, key_of, normal
from simulator.pace import Pace
from simulator.proposing import EAGLE, EagleProfile, ProposingTarget
from simulator.recorded import RecordedAcceptance
from simulator.scripts import Scripts
from simulator.systems import System
from simulator.workers import SimulatedDrafter, SimulatedTarget
from simulator.workloads import SimRequest
from verifier.messages import VerifyCall, VerifyResult

# Tokens of texts; the one after them ends an answer.
VOCAB_SIZE = 32000
TICK_S = 1.0
# A request's script is kept so long after its end: a drafter may still be asked about it.
KEPT_S = 10.0
DRAFTER_REQUESTS = 1 << 16
_CLIENT = "client"
# Streams of noise that belong to the run and not to a request.
_PROMPT, _JITTER, _PACE = 101, 102, 103


@dataclass(frozen=True, slots=True)
class _Ended:
    """The script of a request that ended may go."""

    request_id: str


@dataclass(frozen=True, slots=True)
class _Woken:
    """A call that was held back is due."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a run is simulated.

    Attributes:
        seed: of everything; a request's text and what drafters say of it follow from it and the request.
        jitter: standard deviation of the logarithm of a forward's time around its cost, which is the mean.
        acceptance: how requests differ, or a log of what drafters said; the profile's fitted model if None.
        believed: costs the scheduler is told; the true ones if None.
        max_s: simulated seconds after which the run is given up; requests not done by then count as missed.
        max_width: widest beam a drafter makes.
        max_depth: deepest draft it makes.
    """

    seed: int = 0
    jitter: float = 0.02
    acceptance: AcceptanceModel | RecordedAcceptance | None = None
    believed: CostProfile | None = None
    max_s: float = float("inf")
    max_width: int = 4
    max_depth: int = 16


class Cell:
    """A scheduler core between simulated workers, on an event clock."""

    def __init__(self, profile: HardwareProfile, system: System, options: Options) -> None:
        """A cell whose workers are ready at time 0."""
        self.profile, self.options = profile, options
        self.clock: EventClock[Event | SimRequest | _Ended | _Woken] = EventClock()
        cost = CostModel(options.believed or profile.cost_profile())
        model = options.acceptance or load_fitted()[profile.acceptance]
        self.scripts = Scripts(model, VOCAB_SIZE)
        target = SimulatedTarget if profile.eagle is None else ProposingTarget
        self.target = target(self.scripts, profile.cost, profile.num_slots, profile.after_drafting)
        self.drafters: dict[str, SimulatedDrafter] = {}
        self.in_place: dict[str, HeadsDrafter] = {}
        self._held_until: float | None = None
        config = system.config.policy
        made = system.policy and system.policy(config, self.scripts, self.drafters)
        recorded = system.config.debug.decisions > 0
        make = RecordedCore if recorded else SchedulerCore
        self.core: SchedulerCore = make(system.config, made or make_policy(config), cost)
        if isinstance(self.core.pool.selector, CheckedSelector):
            self.core.pool.selector.must_not_fail()
        self.receipts: dict[str, tuple[float, Receipt]] = {}
        self.num_rejected = 0
        self.machine = Machine(collocated=profile.collocated)
        half_s = profile.overhead_s / 2
        self._trips = profile.trips or Trips(verify_s=half_s, draft_s=half_s)
        self._num_awaited = 0
        self._awaited: set[str] = set()
        self._jitter = key_of(options.seed, _JITTER)
        self._num_forwards = 0
        self._noise: list[float] = []
        self._pace = Pace(profile.pace, key_of(options.seed, _PACE)) if profile.pace else None
        self.clock.at(0.0, VerifierReady(profile.num_slots, profile.max_tokens, VOCAB_SIZE + 1))
        for name, drafter in profile.drafters.items():
            capabilities = Capabilities(
                kind="model",
                max_depth=options.max_depth,
                max_width=options.max_width,
                has_probabilities=True,
                needs_prefill=True,
                vocab_size=VOCAB_SIZE + 1,
                max_tokens=profile.max_tokens,
                num_parameters=drafter.num_parameters,
            )
            table = self.scripts.table(name, drafter.quality, options.max_width, drafter.stream)
            self.drafters[name] = SimulatedDrafter(
                table, self.scripts, drafter.cost, capabilities, drafter.call_s
            )
            self.clock.at(0.0, DrafterReady(name, capabilities, DRAFTER_REQUESTS))
        if profile.eagle is not None and isinstance(self.target, ProposingTarget):
            self._add_eagle(profile.eagle, self.target)

    def _add_eagle(self, eagle: EagleProfile, target: ProposingTarget) -> None:
        width = self.options.max_width
        self.in_place[EAGLE] = drafter = HeadsDrafter(
            num_heads=eagle.layers,
            vocab_size=VOCAB_SIZE + 1,
            max_tokens=self.profile.max_tokens,
            num_candidates=width,
            max_width=width,
            kind="eagle",
        )
        target.eagle, target.table = eagle, self.scripts.table(EAGLE, eagle.quality, width)
        self.core.sending_ahead.holds_back = True
        self.clock.at(0.0, DrafterReady(EAGLE, drafter.capabilities, DRAFTER_REQUESTS))

    def submit(self, request: SimRequest, *, is_awaited: bool = True) -> None:
        """Let a request arrive when it is due; the run ends when all that are awaited have."""
        if is_awaited:
            self._awaited.add(request.request_id)
            self._num_awaited += 1
        self.clock.at(request.arrival_s, request)

    def run(self, progress: Callable[[float, int], None] | None = None) -> None:
        """Serve to its end everything submitted that is awaited.

        Args:
            progress: told the simulated time and how many requests have ended, once a simulated second.
        """
        clock = self.clock
        ticking = Tick()
        clock.at(clock.now + TICK_S, ticking)
        while clock:
            event = self._take_due()
            if event is None:
                continue
            if event is ticking:
                if progress is not None:
                    progress(clock.now, self._num_awaited - len(self._awaited))
                if not self._awaited or clock.now > self.options.max_s:
                    return
                clock.at(clock.now + TICK_S, ticking)
            self._handle(event)

    def _take_due(self) -> Event | None:
        """Take what is due next, as the core is told of it; None if there is nothing to tell."""
        event = self.clock.take()
        if isinstance(event, _Ended):
            self.scripts.remove(event.request_id)
            return None
        if isinstance(event, _Woken):
            return Tick()
        if isinstance(event, VerifyDone):
            return self._timed(event)
        return self._arrived(event) if isinstance(event, SimRequest) else event

    def _handle(self, event: Event) -> None:
        """Let the core decide, and do what it decides."""
        for action in self.core.handle(event, self.clock.now):
            self._act(action)
        for action in self.core.reflect():
            self._act(action)
        until = self.core.sending_ahead.held_until
        if until is not None and until != self._held_until:
            self.clock.at(max(until, self.clock.now), _Woken())
        self._held_until = until

    def _arrived(self, request: SimRequest) -> RequestArrived:
        """The request as a front end would submit it; its prompt is made only now, for memory's sake."""
        self.scripts.add(
            request.request_id,
            request.kind,
            request.seed,
            request.num_prompt,
            request.num_output,
            ends_early=request.ends_early,
        )
        return RequestArrived(submission(request), _CLIENT)

    def _act(self, action: Action) -> None:
        match action:
            case Draft(name, call) if name in self.in_place:
                result = self.in_place[name].draft(call)
                # What it took itself is among the times of a step besides forwards.
                result = msgspec.structs.replace(result, seconds=result.forward_seconds)
                self.clock.at(self.clock.now, DraftDone(name, result))
            case Draft(name, call):
                result = self.drafters[name].draft(call)
                if self._pace is not None:
                    pace = self._pace.at(self.clock.now)
                    result = msgspec.structs.replace(
                        result,
                        seconds=pace * result.seconds,
                        forward_seconds=pace * result.forward_seconds,
                    )
                hop_s = (self._trips.draft_s + self._trips.draft_request_s * len(call.items)) / 2
                done = self.machine.draft(name, self.clock.now + hop_s, result.seconds)
                self.clock.at(done + hop_s, DraftDone(name, result))
            case Verify(call):
                self._verify(call)
            case Emit(_, events):
                for told in events:
                    if told.receipt is not None:
                        self.receipts[told.request_id] = (self.clock.now, told.receipt)
                        self._awaited.discard(told.request_id)
                        self.clock.at(self.clock.now + KEPT_S, _Ended(told.request_id))
            case Reject(_, rejection):
                self.num_rejected += rejection.request_id in self._awaited
                self._awaited.discard(rejection.request_id)

    def _verify(self, call: VerifyCall) -> None:
        result = self.target.step(call)
        seconds = self._vary(result.forward_seconds) + _beside_s(result)
        hop_s = self._verify_hop_s(result)
        gap_s = self._trips.gap_s(len(result.verdicts) + len(result.prefills))
        done = self.machine.verify(call.call_id, self.clock.now + hop_s, seconds, gap_s)
        self.clock.at(done + hop_s, VerifyDone(result))

    def _timed(self, done: VerifyDone) -> VerifyDone | None:
        """The answer with the time it took; None if drafters delayed it meanwhile: it comes again later."""
        due = self.machine.due(done.result.call_id) + self._verify_hop_s(done.result)
        if due > self.clock.now:
            self.clock.at(due, done)
            return None
        seconds = self.machine.verified(done.result.call_id)
        forward_s = seconds - _beside_s(done.result)
        return VerifyDone(msgspec.structs.replace(done.result, seconds=seconds, forward_seconds=forward_s))

    def _verify_hop_s(self, result: VerifyResult) -> float:
        verdicts = result.verdicts
        drafted = any(one.nodes or one.proposals is not None for one in verdicts)
        return self._trips.call_s(len(verdicts) + len(result.prefills), drafted=drafted) / 2

    def _vary(self, seconds: float) -> float:
        if self._pace is not None:
            seconds *= self._pace.at(self.clock.now)
        if self.options.jitter == 0.0:
            return seconds
        if not self._noise:
            deviation = self.options.jitter * normal(self._jitter, self._num_forwards, 1024)
            drawn = np.exp(deviation - self.options.jitter**2 / 2)
            self._noise = drawn.tolist()[::-1]
            self._num_forwards += 1024
        return seconds * self._noise.pop()


def _beside_s(result: VerifyResult) -> float:
    """Seconds of a step beside the target's forward."""
    return result.seconds - result.forward_seconds


def submission(request: SimRequest) -> Submit:
    """The request as a front end submits it.

    Prompts of a class draw on a vocabulary of their own, so that it can be told from the prompt.
    """
    draws = bits(key_of(request.seed, _PROMPT), 0, request.num_prompt)
    offset = key_of(*request.kind.encode()) % (VOCAB_SIZE // 2)
    prompt: list[int] = ((draws % np.uint64(2000)).astype(np.int64) + offset).tolist()
    return Submit(
        request_id=request.request_id,
        prompt=prompt,
        sampling=SamplingParams(
            temperature=0.0,
            max_tokens=request.max_tokens or request.num_output,
            seed=request.seed,
            stop_token_ids=(VOCAB_SIZE,) if request.ends_early else (),
        ),
        objective=request.objective,
        tier=request.kind,
        priority=request.priority,
        on_miss=request.on_miss,
        downgrades=request.downgrades,
        tenant=request.tenant,
    )


def simulate(
    profile: HardwareProfile,
    system: System,
    requests: Sequence[SimRequest],
    options: Options | None = None,
    progress: Callable[[float, int], None] | None = None,
    background: Sequence[SimRequest] = (),
) -> RunResult:
    """Serve requests on one simulated cell and say how it went.

    Args:
        profile: models and hardware.
        system: policy and batching rule.
        requests: to serve; each needs `num_output` of at least 1.
        options: how to simulate.
        progress: as for `Cell.run`.
        background: more of them, whose ends are not waited for.
    """
    cell = Cell(profile, system, options or Options())
    for request in requests:
        cell.submit(request)
    for request in background:
        cell.submit(request, is_awaited=False)
    cell.run(progress)
    told = cell.receipts
    outcomes = [Outcome.of(request, told.get(request.request_id)) for request in requests]
    beside = [Outcome.of(one, told[one.request_id]) for one in background if one.request_id in told]
    return RunResult.of(system.name, outcomes, cell.core.totals, cell.num_rejected, beside)
