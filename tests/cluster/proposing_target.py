"""A simulated target beside which heads, or an EAGLE layer, propose; from that it grows trees itself."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np

from engine.proposals import Proposals
from engine.proposed_growth import grown
from engine.tree import TokenTree
from tests.cluster.simulated import VOCAB, SimulatedTarget, next_token
from verifier.messages import PrefillItem, Verdict, VerifyCall, VerifyItem, VerifyResult

HEADS, CANDIDATES, LAYERS = 3, 4, 6


@dataclass
class ProposingTarget(SimulatedTarget):
    """Proposes what is right with a given probability, to whoever asks.

    Attributes:
        accuracy: of the first choice of each layer.
        kind: what proposes.
        ends_at: layers after which a beam ends.
        proposal_s: seconds of each proposal.
        proposed: the newest of each request.
        grown: trees that were grown here, call by call and by request.
    """

    accuracy: float = 0.9
    kind: Literal["heads", "eagle"] = "eagle"
    ends_at: int = 99
    proposal_s: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    proposed: dict[str, Proposals] = field(default_factory=dict)
    grown: dict[int, dict[str, TokenTree]] = field(default_factory=dict)

    def step(self, call: VerifyCall) -> VerifyResult:
        """See `SimulatedTarget`; who ended in the call before, when this one was on its way, gets nothing."""
        ended = [item.request_id for item in call.verify if item.tree is None and self._has_all(item)]
        served = [item for item in call.verify if item.request_id not in ended]
        served = [item if item.plan is None else self._grown(call, item) for item in served]
        result = super().step(msgspec.structs.replace(call, verify=served))
        items: list[VerifyItem | PrefillItem] = [*call.verify, *call.prefill]
        asking = {item.request_id: item for item in items if item.num_candidates}

        def proposing(verdict: Verdict | None) -> Verdict | None:
            if verdict is None:
                return None
            item = asking.get(verdict.request_id)
            self.proposed.pop(verdict.request_id, None)
            if item is None:
                return verdict
            self.proposed[verdict.request_id] = proposals = self._proposals(item)
            return msgspec.structs.replace(verdict, proposals=proposals)

        verdicts = [proposing(verdict) for verdict in result.verdicts]
        nothing = [Verdict(request_id=name, tokens=[]) for name in ended]
        return msgspec.structs.replace(
            result,
            verdicts=[verdict for verdict in verdicts if verdict is not None] + nothing,
            prefills=[msgspec.structs.replace(p, verdict=proposing(p.verdict)) for p in result.prefills],
        )

    def _has_all(self, item: VerifyItem) -> bool:
        held = self.held.get(item.request_id)
        if held is None:
            return False
        spec, tokens, _ = held
        return len(tokens) - spec.prompt_len >= spec.sampling.max_tokens or len(tokens) >= self.max_tokens

    def _grown(self, call: VerifyCall, item: VerifyItem) -> VerifyItem:
        """With the tree that its plan makes of what was proposed; without where a prompt had no slots."""
        held, proposals = self.held.get(item.request_id), self.proposed.get(item.request_id)
        if held is None or len(held[1]) == len(held[0].tokens):
            return msgspec.structs.replace(item, plan=None)
        spec, tokens, _ = held
        assert item.plan is not None
        if proposals is not None and proposals.position != len(tokens):
            proposals = None
        tree = grown(tokens[-1], item.plan, frozenset(spec.sampling.stop_token_ids), proposals)
        self.grown.setdefault(call.call_id, {})[item.request_id] = tree
        return msgspec.structs.replace(item, tree=tree, plan=None)

    def _proposals(self, item: VerifyItem | PrefillItem) -> Proposals:
        tokens = list(self.held[item.request_id][1])
        position, rows = len(tokens), []
        for _ in range(min(item.num_heads or HEADS, self.ends_at)):
            tokens.append(next_token(tokens))
            first = tokens[-1] if self.rng.random() < self.accuracy else (tokens[-1] + 9) % VOCAB
            rows.append([(first + i) % VOCAB for i in range(item.num_candidates)])
        logp = np.log(np.linspace(0.9, 0.01, item.num_candidates, dtype=np.float32))
        token = np.array(rows, dtype=np.int32)
        return Proposals(
            position=position,
            token=token,
            logp=np.tile(logp, (len(rows), 1)).astype(np.float32),
            parent=None if self.kind == "heads" else np.zeros_like(token),
            seconds=self.proposal_s,
        )
