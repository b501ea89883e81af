"""The scheduler core beside a simulated target whose decoding heads, or EAGLE layer, propose."""

from __future__ import annotations

from collections import deque
from typing import Any, Literal

import msgspec

from cluster.config import FlotillaConfig
from cluster.core import SchedulerCore
from cluster.cost_model import CostModel, CostProfile
from cluster.events import (
    Draft,
    DraftDone,
    DrafterReady,
    Event,
    RequestArrived,
    VerifierReady,
    Verify,
    VerifyDone,
)
from cluster.linear_cost import LinearCost
from cluster.policies.registry import make_policy
from cluster.stream_messages import Submit
from drafters.heads_drafter import HeadsDrafter
from drafters.messages import DraftPlan
from engine.sampling_params import SamplingParams
from engine.stop_rules import StopRule
from tests.cluster.proposing_target import CANDIDATES, HEADS, LAYERS, ProposingTarget
from tests.cluster.simulated import VOCAB
from verifier.messages import PrefillItem, VerifyCall, VerifyItem

HEAD = LinearCost(delta=2e-4, rho=1e-4)
CHEAP = CostProfile(target=LinearCost(delta=1e-2, gamma=1e-5), drafters={"heads": HEAD}, overhead_s=1e-3)
# Every row costs as much as a forward: nothing drafted is worth verifying.
DEAR = msgspec.structs.replace(CHEAP, target=LinearCost(delta=1e-3, gamma=1e-2))
OVERHEAD_S = 1e-3
DRAFT_S = 1e-4


class HeadsWorld:
    """The core, a simulated target whose heads are right with a given probability, and the heads drafter."""

    def __init__(
        self,
        policy: str,
        profile: CostProfile,
        accuracy: float,
        kind: Literal["heads", "eagle"] = "heads",
        ends_at: int = 99,
        **options: object,
    ) -> None:
        raw = {
            "target": {"path": "simulated"},
            "policy": {"name": policy, **options},
            "selector": {"name": "fixed"},
        }
        config = FlotillaConfig.model_validate(raw)
        self.profile = profile
        self.core = SchedulerCore(config, make_policy(config.policy), CostModel(profile))
        self.target = ProposingTarget(8000, 2000, accuracy=accuracy, kind=kind, ends_at=ends_at)
        self.drafter = HeadsDrafter(
            num_heads=HEADS if kind == "heads" else LAYERS,
            vocab_size=VOCAB,
            max_tokens=2000,
            num_candidates=CANDIDATES,
            kind=kind,
        )
        self.now, self.calls, self.evaluated_s = 0.0, list[VerifyCall](), 0.0
        self.plans: list[list[DraftPlan]] = []
        self.rules: list[StopRule | None] = []  # of the draft calls
        self._events: deque[Event] = deque(
            [VerifierReady(8000, 2000, VOCAB), DrafterReady("heads", self.drafter.capabilities, 64)]
        )
        self.submit(-1, 1)  # while it is served, all others arrive: they are prefilled together

    def submit(self, number: int, max_tokens: int, **changes: Any) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        prompt = [number + 1, 3, 5]
        submit = Submit(request_id=f"r{number}", prompt=prompt, sampling=sampling, **changes)
        self._events.append(RequestArrived(submit, "client"))

    def run(self, num_steps: int = 1 << 20) -> None:
        """Until so many more verify calls are served, or nothing is left to do."""
        until = len(self.calls) + num_steps
        while self._events and len(self.calls) < until:
            event = self._events.popleft()
            if isinstance(event, VerifyDone):  # the target begins with a call when it is done with another
                self.now += event.result.seconds
            for action in [*self.core.handle(event, self.now), *self.core.reflect()]:
                if isinstance(action, Draft):
                    self.plans.append([item.plan for item in action.call.items])
                    self.rules.append(action.call.stop_rule)
                    result = self.drafter.draft(action.call)
                    seconds = result.forward_seconds + DRAFT_S
                    self.now += DRAFT_S
                    self._events.append(DraftDone("heads", msgspec.structs.replace(result, seconds=seconds)))
                elif isinstance(action, Verify):
                    self._verify(action.call)

    def _verify(self, call: VerifyCall) -> None:
        self.calls.append(call)
        items: list[VerifyItem | PrefillItem] = [*call.verify, *call.prefill]
        asking = [item for item in items if item.num_candidates]
        most = max((item.num_heads or HEADS for item in asking), default=0)
        heads_s = most * HEAD.seconds(len(asking), len(asking), 0) if asking else 0.0
        self.evaluated_s += heads_s
        self.target.proposal_s = heads_s / max(1, len(asking))
        result = self.target.step(call)
        trees = self.target.grown.get(call.call_id, {})
        rows = [
            len(trees[item.request_id]) if item.request_id in trees else item.num_nodes
            for item in call.verify
        ]
        tokens = sum(rows) + sum(item.num_tokens for item in call.prefill)
        forward_s = self.profile.target.seconds(len(items), tokens, 0)
        seconds = forward_s + heads_s + OVERHEAD_S
        result = msgspec.structs.replace(result, forward_seconds=forward_s, seconds=seconds)
        self._events.append(VerifyDone(result))


def asked(call: VerifyCall) -> dict[str, tuple[int, int]]:
    """Heads and candidates wanted, by request."""
    items: list[VerifyItem | PrefillItem] = [*call.verify, *call.prefill]
    return {i.request_id: (i.num_heads or 0, i.num_candidates) for i in items if i.num_candidates}


def drafted(call: VerifyCall) -> bool:
    """Whether trees are verified, or planned, as far as the call says."""
    return any(item.num_nodes > 1 for item in call.verify)
