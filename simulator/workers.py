"""Simulated workers: they answer the scheduler's calls and say how long a real one would have taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cluster.call_parts import chunk_rows
from cluster.linear_cost import LinearCost
from drafters.messages import Draft, DraftCall, DraftItem, DraftPlan, DraftResult
from drafters.protocol import Capabilities
from engine.tree import TokenTree
from simulator.drafting import grow
from simulator.scripts import DrafterTable, Scripts
from verifier.messages import (
    SMALLEST_CHUNK,
    PrefillProgress,
    Verdict,
    VerifyCall,
    VerifyItem,
    VerifyResult,
)

Int64 = NDArray[np.int64]


@dataclass(slots=True)
class _Heard:
    """What a drafter has of one request: rows of its table, tokens heard of, and of those the ones scored."""

    row: int
    prompt_len: int
    num_tokens: int
    max_output: int
    scored: int = 0


class SimulatedDrafter:
    """A model drafter without a model: its trees come from a `DrafterTable`, its time from its cost."""

    def __init__(
        self,
        table: DrafterTable,
        scripts: Scripts,
        cost: LinearCost,
        capabilities: Capabilities,
        call_s: float = 0.0,
    ) -> None:
        self.table, self.cost, self.capabilities = table, cost, capabilities
        self._scripts, self._call_s = scripts, call_s
        self._held: dict[str, _Heard] = {}

    def draft(self, call: DraftCall) -> DraftResult:
        """Draft for every item of the call."""
        for request_id in call.release:
            self._held.pop(request_id, None)
        heard, items, unknown, caught_up = [], [], [], 0
        for item in call.items:
            held = self._held.get(item.request_id)
            known, num_new = self._hear(item, held)
            if known is None:
                unknown.append(item.request_id)
                continue
            if known is not held:
                self._held[item.request_id] = known
            caught_up += num_new
            heard.append(known)
            items.append(item)
        plans = [self._fit(item.plan, held) for item, held in zip(items, heard, strict=True)]
        trees, forwards, rows = self._trees(items, heard, plans, call)
        num_context = sum(held.num_tokens for held in heard)
        seconds = self._seconds(len(heard), caught_up, num_context, forwards, rows)
        drafts = [
            self._scored(item, held, tree) for item, held, tree in zip(items, heard, trees, strict=True)
        ]
        return DraftResult(
            call_id=call.call_id,
            drafts=drafts,
            unknown=unknown,
            seconds=self._call_s + seconds,
            forward_seconds=seconds,
            num_forwards=max(1, len(forwards)),
        )

    def _hear(self, item: DraftItem, held: _Heard | None) -> tuple[_Heard | None, int]:
        """The request as of this item and tokens new in it; None if the drafter lacks what came before."""
        if item.spec is not None:
            if item.request_id not in self._scripts:  # it ended while the call was on its way
                return None, 0
            script, num_tokens = self._scripts[item.request_id], len(item.spec.tokens)
            row = self._scripts.row(script, self.table)
            bound = item.spec.sampling.max_tokens
            return _Heard(row, item.spec.prompt_len, num_tokens, bound), num_tokens
        if held is None or item.start > held.num_tokens or item.request_id not in self._scripts:
            return None, 0
        before, held.num_tokens = held.num_tokens, item.start + len(item.tokens)
        return held, held.num_tokens - before

    def _fit(self, plan: DraftPlan, held: _Heard) -> DraftPlan:
        left = held.prompt_len + held.max_output - held.num_tokens - 1
        capabilities = self.capabilities
        depth = min(plan.depth, capabilities.max_depth, left, capabilities.max_tokens - held.num_tokens)
        if depth == plan.depth and plan.width <= capabilities.max_width:
            return plan
        return DraftPlan(
            depth=max(0, depth),
            width=min(plan.width, capabilities.max_width),
            stop_logp=plan.stop_logp,
            stop_token_logp=plan.stop_token_logp,
            least_forward_logp=plan.least_forward_logp,
        )

    def _trees(
        self, items: Sequence[DraftItem], heard: Sequence[_Heard], plans: Sequence[DraftPlan], call: DraftCall
    ) -> tuple[list[TokenTree], list[int], list[int]]:
        """The trees; for each layer's forward, how many requests were in it, and with how many rows."""
        groups: dict[int, list[int]] = {}
        for place, plan in enumerate(plans):
            groups.setdefault(plan.width if plan.depth > 0 else 0, []).append(place)
        trees: list[TokenTree] = [_NO_TREE] * len(items)
        forwards: list[int] = []
        rows: list[int] = []
        tokens = [int(i.tokens[-1]) if len(i.tokens) else i.spec.tokens[-1] if i.spec else 0 for i in items]
        for width, places in groups.items():
            if width == 0:
                for place in places:
                    trees[place] = TokenTree.root_only(tokens[place])
                continue
            roots = np.array([heard[p].row + heard[p].num_tokens - heard[p].prompt_len for p in places])
            grown, counts = grow(
                self.table,
                roots,
                np.array([tokens[p] for p in places]),
                [plans[p] for p in places],
                call.stop_rule,
                self._scripts.end_token,
            )
            for place, tree in zip(places, grown, strict=True):
                trees[place] = tree
            for layer, count in enumerate(counts):
                if layer == len(forwards):
                    forwards.append(0)
                    rows.append(0)
                forwards[layer] += count
                rows[layer] += count * width
        return trees, forwards, rows

    def _seconds(
        self, num_requests: int, caught_up: int, num_context: int, forwards: list[int], rows: list[int]
    ) -> float:
        """One forward catches up and gives the first layer; each further one has the rows of the last."""
        if num_requests == 0:
            return 0.0
        cost, mean = self.cost, num_context / num_requests
        tokens = max(caught_up, num_requests)
        seconds = cost.seconds(num_requests, tokens, num_context, tokens * mean)
        for count, num_rows in zip(forwards[1:], rows[1:], strict=True):
            seconds += cost.seconds(count, num_rows, int(count * mean))
        return seconds

    def _scored(self, item: DraftItem, held: _Heard, tree: TokenTree) -> Draft:
        position = held.num_tokens - held.prompt_len
        agreed, scored = self.table.agreed, position - held.scored
        if scored <= 0:
            return Draft(request_id=item.request_id, tree=tree)
        row = held.row
        right = int(agreed[row + position]) - int(agreed[row + held.scored])
        held.scored = position
        return Draft(request_id=item.request_id, tree=tree, num_scored=scored, num_agreed=right)


_NO_TREE = TokenTree.root_only(0)


@dataclass(slots=True)
class _Kept:
    """What the target has of one request; `num_tokens` counts the last one too, whose KV it lacks.

    Of them it was opened with `num_given`.
    """

    base: int
    prompt_len: int
    max_output: int
    num_tokens: int
    num_given: int
    num_computed: int = 0


@dataclass
class SimulatedTarget:
    """A target without a model: its tokens are the scripts', its time its cost.

    Attributes:
        scripts: what the requests say.
        cost: of its forwards.
        num_slots: tokens its KV pool holds.
        after_drafting: factor on what decodes in a forward with drafts in it.
    """

    scripts: Scripts
    cost: LinearCost
    num_slots: int
    after_drafting: float = 1.0
    _held: dict[str, _Kept] = field(default_factory=dict)
    _used: int = 0

    def step(self, call: VerifyCall) -> VerifyResult:
        """Verify and prefill; the answer says how long the forward takes."""
        for request_id in call.release:
            kept = self._held.pop(request_id, None)
            if kept is not None:
                self._used -= kept.num_computed
        free = self.num_slots - self._used
        served: list[VerifyItem] = []
        holds: list[_Kept] = []
        deferred, unknown = [], []
        num_tokens = num_context = 0
        num_attended = 0.0
        for item in call.verify:
            held = self._held.get(item.request_id)
            if held is None:
                unknown.append(item.request_id)
                continue
            size = item.num_nodes
            # Sent ahead with a chunk that was to end its prompt, and had no slots.
            is_early = item.tree is None and held.num_tokens == held.num_given
            if is_early or free < size:
                deferred.append(item.request_id)
                continue
            free -= size
            num_tokens += size
            num_context += held.num_tokens
            num_attended += size * held.num_tokens
            served.append(item)
            holds.append(held)
        verdicts = self._decide(served, holds)
        slowed_s = 0.0
        if self.after_drafting != 1.0 and num_tokens > len(served):
            slowed_s = self.cost.seconds(len(served), num_tokens, num_context, num_attended)
            slowed_s *= self.after_drafting - 1.0
        prefills, num_chunks = [], 0
        for chunk in call.prefill:
            if chunk.spec is not None:
                self._open(chunk.request_id, chunk.spec.prompt_len, len(chunk.spec.tokens))
            held = self._held.get(chunk.request_id)
            if held is None:
                unknown.append(chunk.request_id)
                continue
            if chunk.spec is None and held.num_tokens > held.num_given:
                continue  # sent ahead, and its prompt ended with the part before
            wanted = min(chunk.num_tokens, held.num_tokens - held.num_computed)
            # As the real one: a chunk takes the slots there are, if they are worth a step.
            size = min(wanted, free)
            if size < min(wanted, SMALLEST_CHUNK):
                deferred.append(chunk.request_id)
                if chunk.spec is not None:
                    del self._held[chunk.request_id]  # as the real one, which opens nothing without room
                continue
            free -= size
            num_tokens += size
            num_chunks += 1
            rows = chunk_rows(held.num_computed, size)
            num_context += rows.num_context
            num_attended += rows.num_attended
            self._used += size
            held.num_computed += size
            verdict = None
            if held.num_computed == held.num_tokens:
                verdict = self._commit(chunk.request_id, held, [])
            prefills.append(
                PrefillProgress(request_id=chunk.request_id, num_computed=held.num_computed, verdict=verdict)
            )
        seconds = self.cost.seconds(len(served) + num_chunks, num_tokens, num_context, num_attended)
        seconds += slowed_s
        return VerifyResult(
            call_id=call.call_id,
            verdicts=verdicts,
            prefills=prefills,
            deferred=deferred,
            unknown=unknown,
            free_slots=self.num_slots - self._used,
            num_tokens=num_tokens,
            seconds=seconds,
            forward_seconds=seconds,
        )

    def _open(self, request_id: str, prompt_len: int, num_tokens: int) -> None:
        script = self.scripts[request_id]
        self._held[request_id] = _Kept(script.base, prompt_len, script.num_output, num_tokens, num_tokens)

    def _decide(self, items: Sequence[VerifyItem], holds: Sequence[_Kept]) -> list[Verdict]:
        """Walk all trees along their texts."""
        trees = [_NO_TREE if item.tree is None else item.tree for item in items]
        sizes = [len(tree.token) for tree in trees]
        total = sum(sizes)
        paths: list[list[int]] = [[] for _ in items]
        if total > len(items):
            size = np.array(sizes)
            start = size.cumsum() - size
            depth = np.concatenate([tree.depth for tree in trees], dtype=np.int64)
            # A node at depth d guesses the d-th token after the root.
            root = np.array([held.base + held.num_tokens - held.prompt_len - 1 for held in holds])
            place = root.repeat(size) + depth
            np.minimum(place, len(self.scripts.text) - 1, out=place)
            token = np.concatenate([tree.token for tree in trees])
            right = ((token == self.scripts.text[place]) & (depth > 0)).nonzero()[0]
            owner = np.arange(len(items)).repeat(size)[right]
            above = np.concatenate([tree.parent for tree in trees])[right].tolist()
            nodes, depths = (right - start[owner]).tolist(), depth[right].tolist()
            for one, node, level, parent in zip(owner.tolist(), nodes, depths, above, strict=True):
                path = paths[one]
                # A right token counts only below the accepted path.
                if level == len(path) + 1 and parent == (path[-1] if path else 0):
                    path.append(node)
        return [
            self._commit(item.request_id, held, path)
            for item, held, path in zip(items, holds, paths, strict=True)
        ]

    def _commit(self, request_id: str, held: _Kept, path: list[int]) -> Verdict:
        position = held.num_tokens - held.prompt_len
        end = min(position + len(path) + 1, held.max_output)
        tokens: list[int] = self.scripts.text[held.base + position : held.base + end].tolist()
        held.num_tokens += len(tokens)
        self._used += held.num_tokens - 1 - held.num_computed
        held.num_computed = held.num_tokens - 1
        return Verdict(request_id=request_id, tokens=tokens, num_accepted=len(path), nodes=path)
