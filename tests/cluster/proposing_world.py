"""A world whose target's EAGLE layer, or heads, propose, and which watches what is sent ahead."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Literal, cast

from cluster.events import DrafterReady, VerifyDone
from drafters.heads_drafter import HeadsDrafter
from engine.tree import TokenTree
from tests.cluster.ahead_world import AheadWorld
from tests.cluster.proposing_target import CANDIDATES, HEADS, LAYERS, ProposingTarget
from tests.cluster.simulated import VOCAB, SimulatedTarget
from verifier.messages import VerifyCall


class ProposingWorld(AheadWorld):
    """The only drafter, `good`, is the target's own; `poor` comes when a test starts it.

    Attributes:
        compared: trees that the target grew, and the scheduler, too.
    """

    def __init__(
        self,
        seed: int,
        policy: str | dict[str, object] = "flotilla",
        kind: Literal["heads", "eagle"] = "eagle",
        accuracy: float = 0.9,
        num_slots: int = 4000,
        **scheduler: Any,
    ) -> None:
        self.kind, self.accuracy = kind, accuracy
        self.compared = 0
        self._is_begun = False
        super().__init__(seed, policy, num_slots=num_slots, **scheduler)
        self._is_begun = True

    def make_target(self, num_slots: int) -> SimulatedTarget:
        """One that proposes."""
        rng = random.Random(self.rng.random())
        return ProposingTarget(num_slots, accuracy=self.accuracy, kind=self.kind, rng=rng)

    def start_drafter(self, name: str) -> None:
        """The target's own, or one with a model."""
        if name == "good":
            layers = HEADS if self.kind == "heads" else LAYERS
            drafter = HeadsDrafter(
                num_heads=layers, vocab_size=VOCAB, max_tokens=200, num_candidates=CANDIDATES, kind=self.kind
            )
            self.drafters[name] = cast(Any, drafter)
            self.handle(DrafterReady(name, drafter.capabilities, 64))
        elif self._is_begun:
            super().start_drafter(name)

    def handle(self, event: Any) -> None:
        """Also compares trees that both have grown, before what they brought is taken in."""
        if isinstance(event, VerifyDone):
            self._compare(event.result.call_id)
        super().handle(event)

    def _compare(self, call_id: int) -> None:
        sent = self.core.verify_calls.sent(call_id)
        target = self.target
        assert isinstance(target, ProposingTarget)
        theirs: Mapping[str, TokenTree] = target.grown.get(call_id, {})
        if sent is None:
            return
        for request_id, tree in theirs.items():
            request = self.core.requests.get(request_id)
            if request is None or not sent.awaits(request):
                continue  # it ended with the call before
            mine = sent.trees[request_id]
            assert mine.token.tolist() == tree.token.tolist()
            assert mine.parent.tolist() == tree.parent.tolist()
            assert request.tree is mine
            self.compared += 1


def is_planned(call: VerifyCall) -> bool:
    """Whether the target is to grow trees for it itself."""
    return any(item.plan is not None for item in call.verify)
