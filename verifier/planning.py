"""From the items of a verify call to rows of a forward pass: which requests, which slots, which tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.grammar import GrammarError, Grammars
from engine.kv_cache import KVCache
from engine.mask_bits import TokenMask
from engine.runner import ModelShape, Segment
from engine.sampling_params import RequestSpec
from engine.slots import OutOfSlots
from engine.tree import TokenTree
from verifier.messages import SMALLEST_CHUNK, PrefillItem, VerifyItem
from verifier.request_state import RequestState

Int32 = NDArray[np.int32]

logger = logging.getLogger(__name__)

# A root that only the device knows: nobody looks at its number.
_UNKNOWN = TokenTree.root_only(0)


class Planned(msgspec.Struct, eq=False, gc=False):
    """One item's share of the forward.

    Attributes:
        state: the request.
        segment: its rows: `num_context` known tokens, then the nodes of `tree`.
        num_context: rows before the root (prefill only).
        tree: nodes that are decided on; None while a prefill is not complete.
        nodes: of the nodes of `tree`, their indices in the tree that was sent, -1 for those the grammar
            added; None if they are its first ones in order.
        is_prefill: whether the item asked for prefill.
        num_cached: tokens found in the cache when this item opened the request, None if it did not.
        num_candidates, num_heads, least_logp, stop_token_logp: what was asked of heads or EAGLE, as of
            `VerifyItem`.
        masks: per node of `tree`, what the grammar of a request with a constraint allows after it; None until
            they are needed.
        is_kept: whether the KV of its row is committed already, though what it decides is not known yet.
    """

    state: RequestState
    segment: Segment
    num_context: int
    tree: TokenTree | None
    nodes: list[int] | None
    is_prefill: bool
    num_cached: int | None = None
    num_candidates: int = 0
    num_heads: int | None = None
    least_logp: float = float("-inf")
    stop_token_logp: float = float("-inf")
    masks: list[TokenMask] | None = None
    is_kept: bool = False

    @property
    def is_chain(self) -> bool:
        """Whether each of its rows follows the one before."""
        return self.segment.visible is None

    @property
    def decides_one(self) -> bool:
        """Whether it surely brings one token, so that another row may follow before the host knows which."""
        is_root = self.tree is not None and len(self.tree) == 1 and self.nodes is None
        return is_root and self.state.is_plain


class _Draft(NamedTuple):
    """What is to be verified of an item; its attributes are those of `Planned`."""

    state: RequestState
    tree: TokenTree
    nodes: list[int] | None
    masks: list[TokenMask] | None


class PromptIncomplete(Exception):
    """A request is to go on from a prompt of which a part had no slots in the call before."""


class PromptComplete(Exception):
    """Of a prompt the next part is to be computed, and there is none: what it shares was longer."""


NotPlanned = KeyError | OutOfSlots | PromptIncomplete | ValueError | GrammarError
"""Why an item cannot be planned."""


class RequestTable:
    """The requests a verifier holds, with their KV slots.

    Between calls the cache holds a request's first `len(tokens) - 1` tokens, or fewer while it is being
    prefilled.
    """

    def __init__(
        self,
        shape: ModelShape,
        num_slots: int,
        *,
        prefix_sharing: bool,
        grammars: Grammars | None = None,
        adapters: Sequence[str] = (),
        leaving: Callable[[str], None] | None = None,
    ) -> None:
        """No requests yet; `leaving` hears of those that are dropped while they still have their slots."""
        self._shape = shape
        self._leaving = leaving
        self._grammars = grammars
        self._adapters = adapters
        self._prefix_sharing = prefix_sharing
        self._cache = KVCache(num_slots, prefix_sharing=prefix_sharing)
        self._requests: dict[str, RequestState] = {}
        # Those of chains are views of it.
        self._positions = np.arange(shape.max_tokens + 1, dtype=np.int32)
        self._positions.flags.writeable = False

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    @property
    def free_slots(self) -> int:
        """KV slots that can be given out, those of evictable shared prefixes included."""
        return self._cache.free_slots

    @property
    def empty_slots(self) -> int:
        """KV slots that can be given out without evicting a shared prefix."""
        return self._cache.empty_slots

    def num_computed(self, request_id: str) -> int:
        """Tokens of the request's sequence in the KV cache."""
        return self._cache.length(request_id)

    def is_finished(self, item: VerifyItem) -> bool:
        """Whether the request is known and has all the tokens it may have.

        Of one whose tree was planned before its last verdict was known, also whether a stop token ended it.
        Not of plain steps, which some ranks begin before that verdict: all of them run the same forward.
        """
        state = self._requests.get(item.request_id)
        return state is not None and (state.remaining <= 0 or (item.plan is not None and state.is_stopped))

    def forget(self, request_id: str) -> None:
        """Drop a request if it is held; its KV stays findable as a shared prefix until evicted."""
        state = self._requests.pop(request_id, None)
        if state is not None:
            if self._leaving is not None:
                self._leaving(request_id)
            self._cache.discard(request_id)
            self._cache.publish(request_id, state.tokens)
            self._cache.release(request_id)

    def forget_all(self, *, with_prefixes: bool) -> None:
        """Drop all requests as by `forget`; if asked to, shared prefixes, too."""
        for request_id in list(self._requests):
            self.forget(request_id)
        if with_prefixes:
            self._cache = KVCache(self._cache.num_slots, prefix_sharing=self._prefix_sharing)

    def plan_verify(self, items: Sequence[VerifyItem]) -> list[Planned | NotPlanned]:
        """Rows of draft trees, of requests each named once. A malformed tree is planned as if nothing had
        been drafted.

        What cannot be planned changes nothing, and is returned in its place: KeyError if the request is not
        held; OutOfSlots; PromptIncomplete; ValueError if the tree does not continue what is known of the
        request; GrammarError if the request's grammar cannot be followed.
        """
        drafts: list[_Draft | NotPlanned] = []
        num_rows = 0
        for item in items:
            try:
                draft = self._draft_of(item, num_rows)
            except (KeyError, ValueError, PromptIncomplete, GrammarError) as error:
                drafts.append(error)
            else:
                drafts.append(draft)
                num_rows += len(draft.tree)
        wanted = [(d.state.request_id, len(d.tree)) for d in drafts if isinstance(d, _Draft)]
        slots: Iterator[Int32 | OutOfSlots]
        try:
            slots = iter(self._cache.reserve_all(wanted))
        except OutOfSlots:  # some may fit
            slots = (self._reserve_or_not(*one) for one in wanted)
        planned: list[Planned | NotPlanned] = []
        for found, item in zip(drafts, items, strict=True):
            if not isinstance(found, _Draft):
                planned.append(found)
                continue
            reserved = next(slots)
            planned.append(
                reserved if isinstance(reserved, OutOfSlots) else self._of_draft(found, item, reserved)
            )
        return planned

    def keep(self, planned: Sequence[Planned]) -> None:
        """Commit the KV of all rows of these, kept whatever they decide; `settle` adds their tokens."""
        self._cache.settle_all(
            [(p.state.request_id, p.segment.slots, range(len(p.segment.slots))) for p in planned]
        )
        for p in planned:
            p.is_kept = True

    def plan_next(self, planned: Sequence[Planned]) -> list[Planned]:
        """The rows after these, which are kept, and decide one token each; there are slots for them."""
        slots = self._cache.reserve_all([(p.state.request_id, 1) for p in planned])
        following = []
        for p, own in zip(planned, slots, strict=True):
            state = p.state
            position = np.array([len(state.tokens)], dtype=np.int32)
            past = self._cache.past(state.request_id)
            segment = Segment(_UNKNOWN.token, position, own, past, None, state.adapter)
            following.append(Planned(state, segment, 0, _UNKNOWN, None, is_prefill=False))
        return following

    def _draft_of(self, item: VerifyItem, num_rows: int) -> _Draft:
        """What is to be verified of an item; others of the call take `num_rows` slots before."""
        state = self._requests[item.request_id]
        # Of a prompt that lacks its last token, too, all tokens but one are computed.
        if not state.is_prefilled or self._cache.length(item.request_id) != len(state.tokens) - 1:
            if item.tree is None:
                raise PromptIncomplete
            raise ValueError("a tree came before the prefill was complete")
        if item.tree is not None:
            tree = self._checked(item.tree, state)
        elif item.plan is not None:
            tree = state.proposed_tree(item.plan)
        else:
            tree = TokenTree.root_only(state.tokens[-1])
        nodes, masks = None, None
        # Deeper nodes could not be committed any more, and might lie beyond the longest sequence.
        if len(tree) > 1 and max(tree.depth.tolist()) >= state.remaining:
            chosen = np.flatnonzero(tree.depth < state.remaining).astype(np.int32)
            tree, nodes = tree.subset(chosen), chosen.tolist()
        if state.params.constraint is not None:
            # What a grammar adds should not cost another request its turn when slots are scarce.
            room = max(0, self._cache.free_slots - num_rows - len(tree)) // 4
            masked = state.masked(tree, min(item.max_forced, room))
            if masked is not None:
                sent = range(len(tree)) if nodes is None else nodes
                nodes = [-1 if node < 0 else sent[node] for node in masked.nodes.tolist()]
                tree, masks = masked.tree, masked.masks
        return _Draft(state, tree, nodes, masks)

    def _checked(self, tree: TokenTree, state: RequestState) -> TokenTree:
        """The tree, or its root alone if it is malformed; ValueError if it does not continue the request."""
        if len(tree) == 0 or tree.token[0] != state.tokens[-1]:
            raise ValueError("the tree's root is not the last committed token")
        try:
            tree.validate()
            tokens = tree.token.tolist()
            if min(tokens) < 0 or max(tokens) >= self._shape.vocab_size:
                raise ValueError("drafted token outside the vocabulary")
        except (ValueError, IndexError, TypeError) as error:  # the latter two from arrays of a wrong type
            logger.error("draft tree of %s ignored: %s", state.request_id, error)
            return TokenTree.root_only(state.tokens[-1])
        return tree

    def _reserve_or_not(self, request_id: str, n: int) -> Int32 | OutOfSlots:
        try:
            return self._cache.reserve(request_id, n)
        except OutOfSlots as error:
            return error

    def _of_draft(self, draft: _Draft, item: VerifyItem, slots: Int32) -> Planned:
        state, tree = draft.state, draft.tree
        size, root = len(tree.token), len(state.tokens) - 1
        visible = None if size == 1 else _mask_of(tree)
        if visible is None and root + size <= len(self._positions):
            positions = self._positions[root : root + size]
        else:
            positions = tree.depth + np.int32(root)
        past = self._cache.past(state.request_id)
        segment = Segment(tree.token, positions, slots, past, visible, state.adapter)
        return Planned(
            state,
            segment,
            num_context=0,
            tree=tree,
            nodes=draft.nodes,
            is_prefill=False,
            num_candidates=item.num_candidates,
            num_heads=item.num_heads,
            least_logp=item.least_logp,
            stop_token_logp=item.stop_token_logp,
            masks=draft.masks,
        )

    def shares_with(self, spec: RequestSpec, before: Sequence[Planned]) -> bool:
        """Whether a prompt would find more of it cached after those that these complete."""
        space = spec.namespace
        complete = [p.state for p in before if p.is_prefill and p.tree is not None]
        return any(
            self._cache.would_share(spec.tokens, one.tokens[: one.prompt_len], space)
            for one in complete
            if one.namespace == space
        )

    def plan_prefill(self, item: PrefillItem) -> Planned:
        """Rows of the next chunk; opens the request if the item carries a new specification.

        Raises:
            KeyError: if the request is neither held nor specified.
            OutOfSlots: nothing is changed then.
            PromptComplete: if all of it is computed.
            ValueError: if the specification cannot be run.
        """
        request_id = item.request_id
        num_cached = None
        state = self._requests.get(request_id)
        if item.spec is not None and (state is None or not state.same_as(item.spec)):
            self.forget(request_id)
            state = RequestState(item.spec, self._shape, self._grammars, self._adapters)
            # A row's logits are those of a forward: with prefixes from the cache, some would be missing.
            shareable = [] if state.wants_prompt_logprobs else state.tokens
            num_cached = self._cache.open(request_id, shareable, state.namespace)
        if state is None:
            raise KeyError(request_id)
        if item.spec is None and state.is_prefilled:
            raise PromptComplete
        computed = self._cache.length(request_id)
        try:
            slots = self._reserve_chunk(
                request_id, min(max(item.num_tokens, 1), len(state.tokens) - computed)
            )
        except OutOfSlots:
            if num_cached is not None:
                self._cache.release(request_id)
            raise
        self._requests[request_id] = state
        end = computed + len(slots)
        is_complete = end == len(state.tokens)
        segment = Segment(
            tokens=np.array(state.tokens[computed:end], dtype=np.int32),
            positions=np.arange(computed, end, dtype=np.int32),
            slots=slots,
            past=self._cache.past(request_id),
            adapter=state.adapter,
        )
        return Planned(
            state,
            segment,
            num_context=len(slots) - is_complete,
            tree=TokenTree.root_only(state.tokens[-1]) if is_complete else None,
            nodes=None,
            is_prefill=True,
            num_cached=num_cached,
            num_candidates=item.num_candidates,
            num_heads=item.num_heads,
            least_logp=item.least_logp,
            stop_token_logp=item.stop_token_logp,
        )

    def _reserve_chunk(self, request_id: str, n: int) -> Int32:
        try:
            return self._cache.reserve(request_id, n)
        except OutOfSlots as error:
            if not SMALLEST_CHUNK <= error.available < n:
                raise
            return self._cache.reserve(request_id, error.available)

    def abandon(self, planned: Planned) -> None:
        """Undo the planning of an item whose forward did not happen."""
        if planned.is_kept:
            return
        request_id = planned.state.request_id
        self._cache.discard(request_id)
        if planned.num_cached is not None:
            self.forget(request_id)

    def settle(self, outcomes: Sequence[tuple[Planned, list[int], list[int]]]) -> None:
        """Commit what became of a call's items.

        Args:
            outcomes: each item; rows of its segment whose KV is kept, ascending; output tokens to append.
        """
        self._cache.settle_all(
            [(p.state.request_id, p.segment.slots, kept) for p, kept, _ in outcomes if not p.is_kept]
        )
        for planned, _, tokens in outcomes:
            state = planned.state
            if planned.is_prefill and planned.tree is not None:
                self._cache.publish(state.request_id, state.tokens[: state.prompt_len])
                state.is_prefilled = True
            state.extend(tokens)


def _mask_of(tree: TokenTree) -> NDArray[np.bool_] | None:
    """Which nodes each one sees; None for a chain, which sees all before it."""
    parents = tree.parent.tolist()
    return None if parents == list(range(-1, len(parents) - 1)) else tree.ancestor_mask()
