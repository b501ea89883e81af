"""A scheduler core in a loop of events whose workers answer from a script; nothing else of a cell."""

from __future__ import annotations

import heapq
import time

from benchmarks.scripted_workers import ScriptedWorkers
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
)
from cluster.linear_cost import LinearCost
from cluster.policies.registry import make_policy
from cluster.stream_messages import Submit
from drafters.protocol import Capabilities

# Forwards of Llama-3.1-70B on four A100s and of a 1B drafter, from the simulator's profile of that name; the
# knee is put where 256 requests with drafts stay below it, so that speculation pays at every size.
PROFILE = CostProfile(
    target=LinearCost(alpha=5.3e-8, gamma=1e-6, delta=2.84e-2, gamma_knee=7.5e-5, knee_tokens=4096.0),
    drafters={"1b": LinearCost(alpha=2e-8, gamma=1e-6, delta=2.3e-3)},
    overhead_s=2e-3,
)
NUM_SLOTS, MAX_TOKENS, VOCAB_SIZE = 1 << 22, 32768, 32000
CAPABILITIES = Capabilities(
    kind="model",
    max_depth=16,
    max_width=4,
    has_probabilities=True,
    needs_prefill=True,
    vocab_size=VOCAB_SIZE,
    max_tokens=MAX_TOKENS,
)


class ScriptedLoop:
    """A core whose workers answer as long after as the costs say.

    Attributes:
        core: what is timed.
        workers: who answer.
        now: the scheduler's clock, in seconds.
        seconds: of processor time that the core has taken for events and afterthoughts.
        steps: verify calls that decode, until now.
        count: events that are or were due.
    """

    def __init__(self, config: FlotillaConfig, seed: int) -> None:
        self.core = SchedulerCore(config, make_policy(config.policy), CostModel(PROFILE))
        self.workers = ScriptedWorkers(seed, NUM_SLOTS)
        self.now = self.seconds = 0.0
        self.steps = self.count = 0
        self._costs = CostModel(PROFILE)
        self._due: list[tuple[float, int, Event]] = []
        self.at(0.0, VerifierReady(NUM_SLOTS, MAX_TOKENS, VOCAB_SIZE))
        self.at(0.0, DrafterReady("1b", CAPABILITIES, 1 << 16))

    def at(self, delay_s: float, event: Event) -> None:
        """An event is due so much later."""
        self.count += 1
        heapq.heappush(self._due, (self.now + delay_s, self.count, event))

    def arrives(self, submit: Submit, delay_s: float = 0.0) -> None:
        """A request is due so much later; it gets as many tokens as it may have."""
        self.workers.left[submit.request_id] = submit.sampling.max_tokens
        self.at(delay_s, RequestArrived(submit, "client"))

    def next(self) -> tuple[Event, list[Action], float]:
        """The next event, what it led to, and the processor seconds that this took."""
        self.now, _, event = heapq.heappop(self._due)
        begun = time.thread_time()
        actions = [*self.core.handle(event, self.now), *self.core.reflect()]
        took_s = time.thread_time() - begun
        self.seconds += took_s
        for action in actions:
            match action:
                case Draft(drafter, call):
                    width = max(item.plan.width for item in call.items)
                    depth = max(item.plan.depth for item in call.items)
                    after_s = self._costs.draft_seconds(drafter, len(call.items), width, depth)
                    self.at(after_s, DraftDone(drafter, self.workers.draft(call, after_s)))
                case Verify(call):
                    self.steps += bool(call.verify)
                    rows = sum(item.num_nodes for item in call.verify)
                    after_s = self._costs.verify_seconds(len(call.verify), rows, 0)
                    self.at(after_s, VerifyDone(self.workers.verify(call, after_s)))
                case Emit(_, events):
                    for _ in range(sum(told.finish_reason is not None for told in events)):
                        self.ended()
        return event, actions, took_s

    def ended(self) -> None:
        """A request was served to its end."""
