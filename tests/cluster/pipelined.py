"""The scheduler core on an event clock with several drafters, watching what the target does meanwhile."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from cluster.config import FlotillaConfig
from cluster.core import SchedulerCore
from cluster.cost_model import CostModel, CostProfile
from cluster.events import (
    Action,
    Draft,
    DraftDone,
    DrafterReady,
    Emit,
    Event,
    RequestArrived,
    VerifierReady,
    Verify,
    VerifyDone,
    WorkerLost,
)
from cluster.invariants import check_invariants
from cluster.linear_cost import LinearCost
from cluster.policies.registry import make_policy
from cluster.requests import State
from cluster.stream_messages import Submit
from drafters.messages import DraftCall
from engine.sampling_params import SamplingParams
from tests.cluster.simulated import VOCAB, SimulatedDrafter, SimulatedTarget, expected_output
from verifier.messages import VerifyCall

MESSAGE_S = 2e-4

# docs/profiling.md, "On two CPU cores".
TWO_CORES = CostProfile(
    target=LinearCost(alpha=995e-9, gamma=121e-6, rho=4.9e-6, delta=2.2e-3),
    drafters={
        "general": LinearCost(alpha=81e-9, gamma=25.5e-6, rho=9.2e-6, delta=0.34e-3),
        "code": LinearCost(alpha=68e-9, gamma=19.5e-6, rho=11.3e-6, delta=0.30e-3),
        "chat": LinearCost(alpha=71e-9, gamma=19.6e-6, rho=10.8e-6, delta=0.30e-3),
        "summary": LinearCost(alpha=30e-9, gamma=16.1e-6, rho=10.1e-6, delta=0.23e-3),
    },
    overhead_s=1e-3,
)


@dataclass(frozen=True)
class Slice:
    """What a worker did when, in simulated seconds."""

    worker: str
    start: float
    end: float
    requests: tuple[str, ...]
    drafted: bool = True


@dataclass
class Work:
    """A call on its way through a worker."""

    answer: Event
    worker: str
    seconds: float


@dataclass
class PipelineWorld:
    """Workers take calls one after the other and the time that `profile` says.

    Attributes:
        speed: factor on the seconds of a drafter's calls, by name.
        num_cores: drafters that compute at the same time.
        saved_ahead: share of a call's forwards a drafter needs no more after it was idle for as long as they
            take: drafting ahead.
        contention: factor on forwards of the target that begin while a drafter computes.
    """

    scheduler: dict[str, object]
    policy: dict[str, object] = field(default_factory=lambda: {"name": "flotilla"})
    profile: CostProfile = TWO_CORES
    accuracy: float = 0.7
    speed: dict[str, float] = field(default_factory=dict)
    num_cores: int = 1
    saved_ahead: float = 0.0
    contention: float = 1.0
    noise: float = 0.05
    seed: int = 0
    # Equal drafters take turns: a selector that learns would leave slow ones out.
    selector: str = "fixed"

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        config = FlotillaConfig.model_validate(
            {
                "target": {"path": "unused"},
                "policy": self.policy,
                "scheduler": {"draft_ahead": self.num_cores, "max_running": 64, **self.scheduler},
                "selector": {"name": self.selector},
            }
        )
        self.core = SchedulerCore(config, make_policy(config.policy), CostModel(self.profile))
        self.target = SimulatedTarget(num_slots=40_000, max_tokens=2000)
        self.drafters: dict[str, SimulatedDrafter] = {}
        self.now = 0.0
        self.slices: list[Slice] = []
        self.counts: list[tuple[float, int]] = []
        self.submits: dict[str, Submit] = {}
        self.output: dict[str, list[int]] = {}
        self.reason: dict[str, str] = {}
        self._queue: list[tuple[float, int, Event | Work]] = []
        self._sequence = 0
        self._busy: dict[str, float] = {}
        self._cores = [0.0] * self.num_cores
        self._idle_since: dict[str, float] = {}
        self._after(0.0, VerifierReady(40_000, 2000, VOCAB))
        for name in self.profile.drafters:
            self.start_drafter(name)

    def start_drafter(self, name: str) -> None:
        self.drafters[name] = drafter = SimulatedDrafter(self.accuracy, self.rng)
        capabilities = msgspec.structs.replace(drafter.capabilities, max_tokens=2000)
        self._after(0.0, DrafterReady(name, capabilities, 64))

    def submit(self, number: int, *, at: float = 0.0, tokens: int = 100, drafter: str = "") -> None:
        """A request of about as many tokens as the demo's, to a drafter by name if one is given."""
        request_id = f"r{number}"
        rng = random.Random(1000 * self.seed + number)
        submit = Submit(
            request_id=request_id,
            prompt=[rng.randrange(VOCAB) for _ in range(100)],
            sampling=SamplingParams(temperature=0.0, max_tokens=tokens),
        )
        if drafter:
            wish = msgspec.structs.replace(submit.speculation, drafters=(drafter,))
            submit = msgspec.structs.replace(submit, speculation=wish)
        self.submits[request_id] = submit
        self._after(at - self.now, RequestArrived(submit, "client"))

    def at(self, seconds: float, event: Event) -> None:
        """Let an event come."""
        self._after(seconds - self.now, event)

    def run(self) -> None:
        """Until all requests have ended; checks after every event what must always hold."""
        while self._queue:
            self.now, _, event = heapq.heappop(self._queue)
            if isinstance(event, Work):
                self._begin(event)
                continue
            if isinstance(event, DraftDone) and event.drafter not in self.drafters:
                continue  # lost before it answered
            self._act(self.core.handle(event, self.now))
            self._check()
            # May change the number of micro-batches, which counts from the next event on: there is one, as
            # nothing is complete now unless somebody drafts.
            self._act(self.core.reflect())
            if not self.counts or self.counts[-1][1] != self.core.micro_batches.count:
                self.counts.append((self.now, self.core.micro_batches.count))
        for request_id, submit in self.submits.items():
            assert self.reason.get(request_id) == "length", f"{request_id} was lost"
            assert self.output[request_id] == expected_output(submit, 2000)
        assert self.core.is_idle

    def lose(self, name: str, at: float) -> None:
        """A drafter dies, and a new one of its name comes 5 ms later."""
        self.at(at, WorkerLost(name))

    def goodput(self, skip: float = 0.0) -> float:
        """Tokens per second up to the last answer."""
        return sum(map(len, self.output.values())) / (self.now - skip)

    def of(self, worker: str) -> list[Slice]:
        """What a worker did, in order."""
        return [one for one in self.slices if one.worker == worker]

    def overlap_s(self) -> float:
        """Seconds in which the target verified while some drafter drafted."""
        total = 0.0
        drafts = [one for one in self.slices if one.worker != "target"]
        for verify in self.of("target"):
            edges = sorted(
                (max(one.start, verify.start), min(one.end, verify.end))
                for one in drafts
                if one.start < verify.end and one.end > verify.start
            )
            reached = verify.start
            for start, end in edges:
                total += max(0.0, end - max(start, reached))
                reached = max(reached, end)
        return total

    def _check(self) -> None:
        check_invariants(self.core)
        if self.core.verify_calls.outstanding is not None:
            return
        for members in self.core.micro_batches.members(list(self.core.running.values())).values():
            states = {request.state for request in members}
            assert State.DRAFTED not in states or State.DRAFTING in states, "complete, and nobody verifies"

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Draft(name, call):
                    answer = DraftDone(name, self.drafters[name].draft(call))
                    self._after(MESSAGE_S, Work(answer, name, self._draft_s(name, call)))
                case Verify(call):
                    seconds = self._forward_s(call)
                    self._after(MESSAGE_S, Work(VerifyDone(self.target.step(call)), "target", seconds))
                case Emit(_, events):
                    for event in events:
                        self.output.setdefault(event.request_id, []).extend(event.tokens)
                        if event.finish_reason is not None:
                            assert event.request_id not in self.reason
                            self.reason[event.request_id] = event.finish_reason

    def _begin(self, work: Work) -> None:
        name, begin, seconds = work.worker, max(self.now, self._busy.get(work.worker, 0.0)), work.seconds
        if isinstance(work.answer, DraftDone):
            core = min(range(self.num_cores), key=self._cores.__getitem__)
            idle_s = begin - self._idle_since.get(name, begin)
            seconds *= 1.0 - self.saved_ahead * (min(1.0, idle_s / seconds) if seconds else 0.0)
            begin = max(begin, self._cores[core])
            self._cores[core] = begin + seconds
            self._idle_since[name] = begin + seconds
            result = msgspec.structs.replace(work.answer.result, seconds=seconds, forward_seconds=seconds)
            answer: Event = DraftDone(name, result)
            requests = tuple(draft.request_id for draft in result.drafts)
        elif isinstance(work.answer, VerifyDone):
            if any(busy > begin for busy in self._cores):
                seconds *= self.contention
            result_ = msgspec.structs.replace(work.answer.result, forward_seconds=seconds, seconds=seconds)
            answer = VerifyDone(result_)
            requests = tuple(verdict.request_id for verdict in result_.verdicts)
        self._busy[name] = begin + seconds
        self.slices.append(Slice(name, begin, begin + seconds, requests))
        self._after(begin + seconds + MESSAGE_S - self.now, answer)

    def _draft_s(self, name: str, call: DraftCall) -> float:
        depth = max((item.plan.depth for item in call.items), default=0)
        width = max((item.plan.width for item in call.items), default=1)
        cost = CostModel(self.profile)
        seconds = cost.draft_seconds(name, len(call.items), width, max(1, depth), 150 * len(call.items))
        return seconds * self.speed.get(name, 1.0) * self._noise()

    def _forward_s(self, call: VerifyCall) -> float:
        tokens = sum(item.num_nodes for item in call.verify) + sum(c.num_tokens for c in call.prefill)
        context = sum(len(self.target.held[item.request_id][1]) for item in call.verify)
        num_requests = len(call.verify) + len(call.prefill)
        return self.profile.target.seconds(num_requests, tokens, context) * self._noise()

    def _noise(self) -> float:
        return self.rng.uniform(1 - self.noise, 1 + self.noise)

    def _after(self, seconds: float, event: Event | Work) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (self.now + max(0.0, seconds), self._sequence, event))
