"""Workers that answer at once from trees drawn beforehand: only the scheduler's own work is real."""

from __future__ import annotations

import numpy as np

from drafters.messages import Draft, DraftCall, DraftResult
from engine.tree import TokenTree
from verifier.messages import PrefillProgress, Verdict, VerifyCall, VerifyResult

# Trees drawn for every shape that is asked for.
NUM_TREES = 64
# Beta distribution of a first choice's probability: mostly sure, and right four times in five.
SURE, UNSURE = 2.0, 0.5
# Share of what is left that each further choice takes.
SECOND_SHARE = 0.4
TOKEN = 7


class ScriptedWorkers:
    """A drafter whose probabilities are what they say, and the target that takes its drafts by them.

    Attributes:
        rng: draws trees and verdicts.
        left: output tokens each request still gets, by id; whoever submits it enters it.
        free_slots: of the target's KV pool, which is never full.
    """

    def __init__(self, seed: int, free_slots: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.left: dict[str, int] = {}
        self.free_slots = free_slots
        self._trees: dict[tuple[int, int], list[TokenTree]] = {}
        self._computed: dict[str, tuple[int, int]] = {}  # prompt tokens computed, of how many

    def draft(self, call: DraftCall, seconds: float) -> DraftResult:
        """Trees of the shapes planned, and scores of the tokens that the drafter hears of."""
        drafts = []
        for item in call.items:
            scored = len(item.tokens)
            drafts.append(
                Draft(
                    request_id=item.request_id,
                    tree=self._tree(item.plan.depth, item.plan.width),
                    num_scored=scored,
                    num_agreed=int(self.rng.binomial(scored, SURE / (SURE + UNSURE))),
                )
            )
        return DraftResult(call_id=call.call_id, drafts=drafts, seconds=seconds, forward_seconds=seconds)

    def verify(self, call: VerifyCall, seconds: float) -> VerifyResult:
        """A verdict for every tree and every prompt that is computed to its end."""
        for request_id in call.release:
            self._computed.pop(request_id, None)
        verdicts = [
            self._verdict(item.request_id, [] if item.tree is None else self._accepted(item.tree))
            for item in call.verify
        ]
        prefills = []
        for chunk in call.prefill:
            spec = chunk.spec
            computed, of = (0, len(spec.tokens)) if spec else self._computed[chunk.request_id]
            computed = min(of, computed + chunk.num_tokens)
            self._computed[chunk.request_id] = (computed, of)
            prefills.append(
                PrefillProgress(
                    request_id=chunk.request_id,
                    num_computed=computed,
                    verdict=self._verdict(chunk.request_id, []) if computed == of else None,
                )
            )
        return VerifyResult(
            call_id=call.call_id,
            verdicts=verdicts,
            prefills=prefills,
            free_slots=self.free_slots,
            seconds=seconds,
            forward_seconds=seconds,
        )

    def _verdict(self, request_id: str, nodes: list[int]) -> Verdict:
        count = min(len(nodes) + 1, self.left[request_id])
        self.left[request_id] -= count
        return Verdict(request_id=request_id, tokens=[TOKEN] * count, num_accepted=len(nodes), nodes=nodes)

    def _accepted(self, tree: TokenTree) -> list[int]:
        """Down from the root: each child is the target's token with the probability its drafter gave it."""
        nodes: list[int] = []
        here, parent, logp = 0, tree.parent.tolist(), tree.logp.tolist()
        for node in range(1, len(parent)):
            if parent[node] == here and self.rng.random() < np.exp(logp[node] - logp[here]):
                nodes.append(node)
                here = node
        return nodes

    def _tree(self, depth: int, width: int) -> TokenTree:
        if depth <= 0:
            return TokenTree.root_only(TOKEN)
        held = self._trees.get((depth, width))
        if held is None:
            held = self._trees[depth, width] = [self._grow(depth, width) for _ in range(NUM_TREES)]
        return held[int(self.rng.integers(NUM_TREES))]

    def _grow(self, depth: int, width: int) -> TokenTree:
        """A beam: in each layer the best `width` of the children of the layer above."""
        parent, logp, depths, above = [-1], [0.0], [0], [0]
        for layer in range(1, depth + 1):
            options = []
            for node in above:
                left = 1.0
                for choice in range(width):
                    share = SECOND_SHARE if choice else float(self.rng.beta(SURE, UNSURE)) * 0.98 + 0.01
                    options.append((logp[node] + float(np.log(left * share)), node))
                    left *= 1.0 - share
            above = []
            for path, node in sorted(options, reverse=True)[:width]:
                above.append(len(parent))
                parent.append(node)
                logp.append(path)
                depths.append(layer)
        return TokenTree.of([TOKEN] * len(parent), parent, logp, depths)
