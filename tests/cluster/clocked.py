"""The scheduler core on a clock of its own: simulated workers that take the time a cost profile says."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from cluster.config import FlotillaConfig
from cluster.core import SchedulerCore
from cluster.cost_model import DEFAULT_PROFILE, CostModel, CostProfile
from cluster.events import (
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
from cluster.stream_messages import Objective, Receipt, Submit
from engine.sampling_params import SamplingParams
from tests.cluster.simulated import VOCAB, SimulatedDrafter, SimulatedTarget
from verifier.messages import VerifyCall

TICK_S = 0.25
# Seconds a message takes, one way.
MESSAGE_S = 2e-4


@dataclass(frozen=True)
class Ended:
    """A finished request and its receipt."""

    submit: Submit
    receipt: Receipt

    def attained(self) -> bool:
        """Whether all its objectives were met."""
        objective, receipt = self.submit.objective, self.receipt
        in_time = objective.ttft_ms is None or (receipt.ttft_ms or 0.0) <= objective.ttft_ms
        return in_time and (objective.tpot_ms is None or (receipt.tpot_ms or 0.0) <= objective.tpot_ms)


class ClockedWorld:
    """Runs arrivals to their ends in simulated time; forwards vary by `noise` around the profile."""

    def __init__(
        self,
        config: FlotillaConfig,
        profile: CostProfile = DEFAULT_PROFILE,
        *,
        accuracy: float = 0.7,
        noise: float = 0.05,
        seed: int = 0,
    ) -> None:
        self.rng = random.Random(seed)
        self.profile = profile
        self.noise = noise
        self.core = SchedulerCore(config, make_policy(config.policy), CostModel(profile))
        self.target = SimulatedTarget(num_slots=8000, max_tokens=2000)
        self.drafter = SimulatedDrafter(accuracy, self.rng)
        self.queue: list[tuple[float, int, Event]] = []
        self.now = 0.0
        self.ended: list[Ended] = []
        self.rejected = 0
        self._sequence = 0
        self._submits: dict[str, Submit] = {}
        self._busy: dict[str, float] = {}
        self._after(0.0, VerifierReady(8000, 2000, VOCAB))
        if profile.drafters:
            name = next(iter(profile.drafters))
            capabilities = msgspec.structs.replace(self.drafter.capabilities, max_tokens=2000)
            self._after(0.0, DrafterReady(name, capabilities, 64))

    def run(self, arrivals: Sequence[tuple[float, Submit]]) -> list[Ended]:
        """Serve all arrivals, given as (seconds, request); whoever is refused counts in `rejected`."""
        for at, submit in arrivals:
            self._submits[submit.request_id] = submit
            self._after(at, RequestArrived(submit, "client"))
        self._after(TICK_S, Tick())
        while self.queue:
            self.now, _, event = heapq.heappop(self.queue)
            if isinstance(event, Tick):
                if len(self.ended) + self.rejected == len(arrivals):
                    continue
                self._after(TICK_S, Tick())
            for action in [*self.core.handle(event, self.now), *self.core.reflect()]:
                match action:
                    case Draft(name, call):
                        depth = max((item.plan.depth for item in call.items), default=0)
                        width = max((item.plan.width for item in call.items), default=1)
                        seconds = self.core.cost.draft_seconds(name, len(call.items), width, max(1, depth))
                        result = msgspec.structs.replace(self.drafter.draft(call), seconds=seconds)
                        self._work(name, seconds, DraftDone(name, result))
                    case Verify(call):
                        seconds = self._forward_s(call)
                        result = msgspec.structs.replace(self.target.step(call), forward_seconds=seconds)
                        self._work("target", seconds, VerifyDone(result))
                    case Emit(_, events):
                        for ended in events:
                            if ended.receipt is not None:
                                self.ended.append(Ended(self._submits[ended.request_id], ended.receipt))
                    case Reject():
                        self.rejected += 1
        return self.ended

    def _forward_s(self, call: VerifyCall) -> float:
        tokens = sum(item.num_nodes for item in call.verify)
        context = 0
        for item in call.verify:
            context += len(self.target.held[item.request_id][1]) if item.request_id in self.target.held else 0
        for chunk in call.prefill:
            held = self.target.held.get(chunk.request_id)
            known = chunk.spec.tokens if chunk.spec is not None else held[1] if held else []
            tokens += min(chunk.num_tokens, max(1, len(known) - (held[2] if held else 0)))
        exact = self.profile.target.seconds(len(call.verify) + len(call.prefill), tokens, context)
        return exact * self.rng.uniform(1 - self.noise, 1 + self.noise)

    def _work(self, worker: str, seconds: float, answer: Event) -> None:
        """A worker takes calls one after the other."""
        begin = max(self.now + MESSAGE_S, self._busy.get(worker, 0.0))
        self._busy[worker] = begin + seconds
        self._after(begin + seconds + MESSAGE_S - self.now, answer)

    def _after(self, seconds: float, event: Event) -> None:
        self._sequence += 1
        heapq.heappush(self.queue, (self.now + seconds, self._sequence, event))


def poisson(
    rate: float,
    seconds: float,
    mix: Sequence[tuple[float, Objective]],
    seed: int,
    *,
    prompt: tuple[int, int] = (20, 160),
    output: tuple[int, int] = (20, 80),
) -> list[tuple[float, Submit]]:
    """Arrivals at `rate` per second whose objectives are drawn from `mix`, pairs of share and objective."""
    rng = random.Random(seed)
    arrivals, at = [], 0.0
    while True:
        at += rng.expovariate(rate)
        if at > seconds:
            return arrivals
        number = len(arrivals)
        kind = rng.choices(range(len(mix)), weights=[share for share, _ in mix])[0]
        arrivals.append(
            (
                at,
                Submit(
                    request_id=f"r{number}",
                    prompt=[rng.randrange(VOCAB) for _ in range(rng.randint(*prompt))],
                    sampling=SamplingParams(temperature=0.0, max_tokens=rng.randint(*output)),
                    objective=mix[kind][1],
                    tier=f"class {kind}",
                ),
            )
        )
