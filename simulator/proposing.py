"""A simulated target beside which EAGLE's layer proposes: what it says of texts is a drafter's table."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from cluster.linear_cost import LinearCost
from drafters.messages import DraftPlan
from engine.proposals import Proposals
from engine.proposed_growth import grown
from engine.tree import TokenTree
from simulator.acceptance import DraftQuality
from simulator.drafting import grow
from simulator.scripts import DrafterTable
from simulator.workers import SimulatedTarget
from verifier.messages import PrefillItem, Verdict, VerifyCall, VerifyItem, VerifyResult

#: Of the drafter, and of its table.
EAGLE = "eagle"


class EagleProfile(msgspec.Struct, frozen=True, kw_only=True):
    """EAGLE's layer beside a target.

    Attributes:
        model: which it is.
        quality: of its drafts, by class of request.
        cost: of a layer of drafts.
        layers: most of them.
        reading_s, reading_request_s: seconds it takes to read what the target kept, and for each request.
        host_s, host_request_s: what the target's process does itself in such a step, which nothing overlaps.
    """

    model: str
    quality: DraftQuality
    cost: LinearCost
    layers: int = 6
    reading_s: float = 0.0
    reading_request_s: float = 0.0
    host_s: float = 0.0
    host_request_s: float = 0.0

    def drafting_s(self, num_requests: int, width: int, layers: int) -> float:
        """Seconds of drafting for so many, reading included."""
        if not num_requests:
            return 0.0
        reading_s = self.reading_s + self.reading_request_s * num_requests
        return reading_s + layers * self.cost.seconds(num_requests, num_requests * width, 0)

    def believed(self) -> LinearCost:
        """A layer's cost as a profile of drafters has it: with its share of reading."""
        return msgspec.structs.replace(
            self.cost,
            delta=self.cost.delta + self.reading_s / self.layers,
            rho=self.cost.rho + self.reading_request_s / self.layers,
        )


@dataclass
class ProposingTarget(SimulatedTarget):
    """See `SimulatedTarget`; answers take `seconds` for their forwards and what is done beside them.

    Attributes:
        eagle, table: what proposes.
    """

    eagle: EagleProfile | None = None
    table: DrafterTable | None = None
    _proposed: dict[str, Proposals] = field(default_factory=dict)

    def step(self, call: VerifyCall) -> VerifyResult:
        """Verify and prefill, grow what was planned ahead, and propose to those that ask."""
        assert self.eagle is not None
        for request_id in call.release:
            self._proposed.pop(request_id, None)
        verify = [item if item.plan is None else self._grown(item) for item in call.verify]
        result = super().step(msgspec.structs.replace(call, verify=verify))
        items: list[VerifyItem | PrefillItem] = [*call.verify, *call.prefill]
        asking = {item.request_id: item for item in items if item.num_candidates}
        verdicts = [*result.verdicts, *(one.verdict for one in result.prefills if one.verdict is not None)]
        asked = [asking[one.request_id] for one in verdicts if one.request_id in asking]
        width = max((item.num_candidates for item in asked), default=1)
        layers = max((self._layers(item) for item in asked), default=0)
        drafting_s = self.eagle.drafting_s(len(asked), width, layers)
        for one in verdicts:
            self._proposed.pop(one.request_id, None)
            if (item := asking.get(one.request_id)) is not None:
                self._propose(item, drafting_s / len(asked))
        host_s = self.eagle.host_s + self.eagle.host_request_s * len(verdicts)
        is_plain = not asked and not any(one.nodes for one in verdicts)
        seconds = result.forward_seconds + (0.0 if is_plain else host_s) + drafting_s
        return msgspec.structs.replace(
            result,
            verdicts=[self._with_proposals(one) for one in result.verdicts],
            prefills=[
                one
                if one.verdict is None
                else msgspec.structs.replace(one, verdict=self._with_proposals(one.verdict))
                for one in result.prefills
            ],
            seconds=seconds,
        )

    def _layers(self, item: VerifyItem | PrefillItem) -> int:
        assert self.eagle is not None
        return min(item.num_heads or self.eagle.layers, self.eagle.layers)

    def _with_proposals(self, verdict: Verdict) -> Verdict:
        proposals = self._proposed.get(verdict.request_id)
        return verdict if proposals is None else msgspec.structs.replace(verdict, proposals=proposals)

    def _grown(self, item: VerifyItem) -> VerifyItem:
        """With the tree of its plan; only drafted tokens are looked at, so that any root will do."""
        held = self._held.get(item.request_id)
        if held is None or held.num_tokens == held.num_given:
            return msgspec.structs.replace(item, plan=None)
        proposals = self._proposed.get(item.request_id)
        if proposals is not None and proposals.position != held.num_tokens:
            proposals = None
        assert item.plan is not None
        tree = grown(0, item.plan, frozenset({self.scripts.end_token}), proposals)
        return msgspec.structs.replace(item, tree=tree, plan=None)

    def _propose(self, item: VerifyItem | PrefillItem, seconds: float) -> None:
        held, name = self._held[item.request_id], item.request_id
        position = held.num_tokens - held.prompt_len
        depth = min(self._layers(item), held.max_output - position - 1)
        if depth < 1 or name not in self.scripts or self.table is None:
            return
        row = self.scripts.row(self.scripts[name], self.table) + position
        plan = DraftPlan(depth=depth, width=item.num_candidates)
        (tree,), _ = grow(
            self.table, np.array([row]), np.zeros(1, dtype=np.int64), [plan], None, self.scripts.end_token
        )
        self._proposed[name] = proposals_of(tree, plan.width, held.num_tokens, seconds)


def proposals_of(tree: TokenTree, width: int, position: int, seconds: float) -> Proposals:
    """A tree, at most so wide, as what was proposed layer by layer: its best path first."""
    layers = int(tree.depth.max())
    token = np.zeros((layers, width), dtype=np.int32)
    logp = np.full((layers, width), -np.inf, dtype=np.float32)
    parent = np.zeros((layers, width), dtype=np.int32)
    place, taken = [0] * len(tree), [0] * (layers + 1)
    for node in range(1, len(tree)):
        layer, above = int(tree.depth[node]), int(tree.parent[node])
        place[node] = at = taken[layer]
        taken[layer] += 1
        token[layer - 1, at] = tree.token[node]
        logp[layer - 1, at] = tree.logp[node] - tree.logp[above]
        parent[layer - 1, at] = place[above]
    return Proposals(position=position, token=token, logp=logp, parent=parent, seconds=seconds)
