"""Drafting from suffix automata over a request's own tokens and recent outputs of all requests.

After SAM-Decoding (Hu et al. 2024, arXiv 2411.10666), which drafts what followed the longest suffix that
occurred before, and SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975), which grows a token tree by
frequency, best path first. Probabilities are those of prediction by partial matching (Cleary & Witten 1984):
the longest context says what follows with the frequencies seen there, and with an escape probability the next
shorter one is asked about the tokens not named yet.

Other requests' outputs influence what is drafted, and through it speed; what a request returns is decided by
the target alone. Timing could still hint at what others were answered: `scope="request"` shares nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, nsmallest
from itertools import islice
from math import exp, log
from typing import Literal

import numpy as np

from drafters.heard import Heard
from drafters.messages import Draft, DraftCall, DraftItem, DraftPlan
from drafters.modelless import ModellessDrafter
from drafters.protocol import Capabilities
from drafters.suffix_automaton import Context, SuffixAutomaton
from drafters.suffix_escapes import EscapeRecord, Source
from drafters.suffix_store import RecentOutputs
from engine.sampling_params import RequestSpec
from engine.stop_rules import StopRule
from engine.tree import TokenTree

# Contexts asked for one distribution, longest first: each further one is a suffix of those before.
_CONTEXTS = 4
# Of the tokens that followed a context the first so many are looked at: what often follows is among them, and
# lists may have thousands of entries that begin alike.
_FOLLOWERS = 128
# Tokens of finished outputs taken in per call, and per piece of idle work.
_TAKE_IN = 256

Sources = list[tuple[SuffixAutomaton, Context]]
_Level = tuple[Source, int, dict[int, int]]
# A request, its tree, and how many tokens were scored and agreed.
_Grown = tuple[str, "_Tree", int, int]


@dataclass(slots=True)
class _Held(Heard):
    """A request: its own automaton, and where its tail is in those of recent outputs."""

    own: SuffixAutomaton
    stops: frozenset[int]
    shared: Sources = field(default_factory=list)
    num_stored: int = 0  # tokens of recent outputs when `shared` was looked up

    @property
    def output(self) -> list[int]:
        return self.tokens[self.spec.prompt_len :]


class SuffixAutomatonDrafter(ModellessDrafter["_Held", _Grown]):
    """Drafts token trees from what followed the present suffix, here and in other requests' outputs."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_tokens: int,
        min_match: int = 2,
        max_match: int = 24,
        scope: Literal["request", "cell"] = "cell",
        capacity: int = 65536,
        max_depth: int = 16,
        max_width: int = 8,
    ) -> None:
        """A drafter that knows nothing yet.

        Args:
            vocab_size: of the target.
            max_tokens: longest sequence (prompt and output), in tokens.
            min_match, max_match: shortest and longest suffix looked up, in tokens.
            scope: whose outputs are searched: the request's own, or those of all requests of the cell but
                the ones with a `cache_salt`, which are neither remembered nor told of others'.
            capacity: tokens of recent outputs remembered, at most; about 500 bytes each.
            max_depth, max_width: bounds of every plan; larger plans are cut down to them.

        Raises:
            ValueError: unless 1 <= min_match <= max_match.
        """
        if not 1 <= min_match <= max_match:
            raise ValueError(f"need 1 <= min_match <= max_match, not {min_match} and {max_match}")
        self._min_match, self._max_match = min_match, max_match
        self._recent = RecentOutputs(capacity, max_match) if scope == "cell" else None
        self._record = EscapeRecord()
        super().__init__(
            Capabilities(
                kind="suffix_automaton",
                max_depth=max_depth,
                max_width=max_width,
                has_probabilities=True,
                needs_prefill=False,
                vocab_size=vocab_size,
                max_tokens=max_tokens,
            )
        )

    def _released(self, ended: Sequence[_Held]) -> None:
        if self._recent is not None:
            for held in ended:
                self._remember(held)
            self._recent.take_in(_TAKE_IN)

    def draft_ahead(self) -> bool:
        """Take in some of what was left unread, then of the outputs that wait for it."""
        if super().draft_ahead():
            return True
        if self._recent is None or not self._recent.num_waiting:
            return False
        self._recent.take_in(_TAKE_IN)
        return self._recent.num_waiting > 0

    def _open(self, spec: RequestSpec, before: _Held | None) -> _Held:
        return _Held(spec, [], SuffixAutomaton(self._max_match), frozenset(spec.sampling.stop_token_ids))

    def _remember(self, held: _Held) -> None:
        """For others, unless the request is kept apart from them: how soon they draft would tell of it."""
        if self._recent is not None and not held.spec.cache_salt:
            self._recent.add(held.output)

    def _read(self, held: _Held, kept: int, new: list[int]) -> tuple[int, int]:
        # A committed output token counts as scored also where no suffix matched: nothing would have been
        # drafted there, so it counts as not agreed.
        if kept < len(held.tokens):
            del held.tokens[kept:]
            held.own = SuffixAutomaton(self._max_match)
            for token in held.tokens:
                held.own.append(token)
            held.shared = []
        self._look_up(held)
        num_scored = num_agreed = 0
        for token in new:
            if len(held.tokens) >= held.spec.prompt_len:
                num_scored += 1
                num_agreed += self._score(held, token)
            held.own.append(token)
            held.tokens.append(token)
            held.shared = [(automaton, automaton.step(at, token)) for automaton, at in held.shared]
        return num_scored, num_agreed

    def _begin(
        self, item: DraftItem, held: _Held, plan: DraftPlan, num_scored: int, num_agreed: int
    ) -> _Grown:
        tree = _Tree(held.tokens[-1], plan)
        self._grow(tree, held)
        return item.request_id, tree, num_scored, num_agreed

    def _drafts(self, call: DraftCall, begun: Sequence[_Grown]) -> list[Draft]:
        depth = self._capabilities.max_depth
        if call.stop_rule is not None:
            depth = _depth_that_pays(call.stop_rule, [tree for _, tree, _, _ in begun], depth)
        return [
            Draft(request_id=request_id, tree=tree.tree(depth), num_scored=scored, num_agreed=agreed)
            for request_id, tree, scored, agreed in begun
        ]

    def _look_up(self, held: _Held) -> None:
        """Find the request's tail in recent outputs, unless nothing was added there since."""
        if self._recent is None or held.spec.cache_salt:
            return
        known = tuple(automaton for automaton, _ in held.shared)
        if known != self._recent.automata or held.num_stored != self._recent.num_tokens:
            held.shared = [(automaton, automaton.match(held.tokens)) for automaton in self._recent.automata]
            held.num_stored = self._recent.num_tokens

    def _sources(self, held: _Held) -> Sources:
        """The automata with the context that the request's tokens are in each."""
        return [(held.own, held.own.tail()), *held.shared]

    def _score(self, held: _Held, token: int) -> bool:
        """Whether `token`, committed next, is the first choice; what its contexts said goes on record."""
        levels = self._levels(self._sources(held))
        losses = self._losses(levels)
        for source, length, followers in levels:
            found = token in followers
            self._record.add(source, length, len(followers), found)
            if found:
                break
        return bool(losses) and min((loss, other) for other, loss in losses.items())[1] == token

    def _levels(self, sources: Sources) -> list[_Level]:
        """The contexts asked, longest first: whose each is, its length, and how often what followed it.

        Tokens that followed a longer one are left out of the shorter ones (PPM's exclusion).
        """
        found: list[tuple[int, int, SuffixAutomaton, Context]] = []
        for order, (automaton, at) in enumerate(sources):
            for context in islice(automaton.contexts(at), _CONTEXTS):
                if context.length >= self._min_match:
                    found.append((-context.length, order, automaton, context))
        found.sort(key=lambda level: level[:2])
        levels: list[_Level] = []
        named: set[int] = set()
        for _, order, automaton, context in found[:_CONTEXTS]:
            first = islice(automaton.followers(context), _FOLLOWERS)
            followers = {token: n for token, n in first if token not in named}
            if followers:
                named.update(followers)
                levels.append((Source.RECENT if order else Source.OWN, context.length, followers))
        return levels

    def _losses(self, levels: list[_Level]) -> dict[int, float]:
        """Negative log-probability of every token that a context names."""
        losses: dict[int, float] = {}
        mass = 1.0
        for source, length, followers in levels:
            rate = self._record.rate(source, length, len(followers))
            each = mass * rate / sum(followers.values())
            for token, count in followers.items():
                losses[token] = -log(each * count)
            mass *= 1.0 - rate
        return losses

    def _candidates(self, sources: Sources, most: int) -> list[tuple[float, int]]:
        """Loss and token of the `most` likely next tokens, likely first."""
        losses = self._losses(self._levels(sources))
        return nsmallest(most, ((loss, token) for token, loss in losses.items()))

    def _grow(self, tree: _Tree, held: _Held) -> None:
        """Grow the tree best path first, until its layers are full or no path goes on."""
        plan = tree.plan
        if not plan.depth:
            return
        waiting: list[tuple[float, int, int, int, Sources]] = []
        serial = 0
        node, sources = 0, self._sources(held)
        while True:
            for loss, token in self._candidates(sources, plan.width):
                serial += 1
                heappush(waiting, (loss - tree.logp[node], serial, node, token, sources))
            while True:
                if not waiting:
                    return
                loss, _, parent, token, sources = heappop(waiting)
                if tree.is_full(tree.depth[parent] + 1):
                    continue
                node = tree.add(parent, token, -loss)
                own = tree.logp[node] - tree.logp[parent]
                if (
                    tree.depth[node] < plan.depth
                    and token not in held.stops
                    and tree.logp[node] >= plan.stop_logp
                    and own >= plan.stop_token_logp
                ):
                    sources = [(automaton, automaton.step(at, token)) for automaton, at in sources]
                    break


class _Tree:
    """A candidate tree while it grows; at most `plan.width` nodes per layer."""

    def __init__(self, root: int, plan: DraftPlan) -> None:
        self.plan = plan
        self.token, self.parent, self.logp, self.depth = [root], [-1], [0.0], [0]
        self._layer_sizes = [1] + [0] * plan.depth

    def is_full(self, depth: int) -> bool:
        return self._layer_sizes[depth] >= self.plan.width

    def add(self, parent: int, token: int, logp: float) -> int:
        self.token.append(token)
        self.parent.append(parent)
        self.logp.append(logp)
        self.depth.append(self.depth[parent] + 1)
        self._layer_sizes[self.depth[-1]] += 1
        return len(self.token) - 1

    def acceptance(self, depth: int) -> list[float]:
        """Path probabilities of the nodes at `depth`."""
        return [exp(logp) for logp, at in zip(self.logp, self.depth, strict=True) if at == depth]

    def tree(self, most: int) -> TokenTree:
        """The tree down to depth `most`."""
        kept = np.array(self.depth, dtype=np.int32) <= most
        new = np.cumsum(kept, dtype=np.int32) - 1
        parent = np.array(self.parent, dtype=np.int32)[kept]
        parent[1:] = new[parent[1:]]
        return TokenTree(
            token=np.array(self.token, dtype=np.int32)[kept],
            parent=parent,
            logp=np.array(self.logp, dtype=np.float32)[kept],
            depth=np.array(self.depth, dtype=np.int32)[kept],
        )


def _depth_that_pays(rule: StopRule, trees: list[_Tree], most: int) -> int:
    """The layer after which another is predicted not to pay.

    The layers cost nothing to draft here, but those kept are to be verified.
    """
    stopping = rule.begin()
    for depth in range(1, most + 1):
        layer = [p for tree in trees for p in tree.acceptance(depth)]
        parents = [p for tree in trees for p in tree.acceptance(depth - 1)]
        if not layer or (depth > 1 and not stopping.pays(parents)):
            return depth - 1
        stopping.correct(layer)
    return most
