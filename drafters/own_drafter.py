"""Drafters of users: a class that proposes tokens, in the frame of drafters without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf, log
from time import perf_counter
from typing import Any, Protocol, overload

import numpy as np

from drafters.heard import Heard
from drafters.messages import Draft, DraftCall, DraftItem, DraftPlan
from drafters.modelless import ModellessDrafter
from drafters.protocol import Capabilities
from engine.own_classes import Guard, OwnClassError, make_own
from engine.sampling_params import RequestSpec
from engine.tree import TokenTree

# Of what is read and not drafted for the last tokens are judged, so many at most; but no further
# proposal is asked for after so many seconds, or a slow class would seem to hang.
READ_TOKENS = 16
READ_S = 0.02


@dataclass(frozen=True)
class OwnDrafterSettings:
    """What the class of a drafter is called with.

    Attributes:
        vocab_size: token ids of the target run below this.
        max_tokens: longest sequence (prompt and output) that the target serves.
        max_depth, max_width: bounds of every plan.
        options: as configured.
    """

    vocab_size: int
    max_tokens: int
    max_depth: int
    max_width: int
    options: Mapping[str, Any]


class Proposer(Protocol):
    """What such a class makes. It may also have `forget(request_id)`, called once a request has ended."""

    def propose(
        self, request_id: str, tokens: Sequence[int], depth: int, width: int
    ) -> Sequence[int] | TokenTree:
        """What may follow.

        Args:
            request_id: whose.
            tokens: prompt and output so far; never the same request's shortened, but for a lost answer.
            depth: how many tokens ahead, at least one.
            width: how many nodes of a layer.

        Returns:
            A chain of tokens, the next one first, or a tree whose root is the last of `tokens`, with
            log-probabilities; nothing, or the root, for no proposal. What goes beyond the plan is left out.
        """
        ...


@dataclass(slots=True)
class _Held(Heard):
    # What was proposed last, as far as what came since agrees; None if nothing was asked.
    expected: list[int] | None = field(default=None)


class OwnDrafter(ModellessDrafter[_Held, Draft]):
    """Drafts what a user's class proposes, checked; where it fails, its requests go on without drafts.

    Chains have the log-probabilities of how often first choices were right so far, by Laplace's rule.
    Committed tokens are scored as far as the last proposal goes; where a request is read and not drafted
    for, the last ones of what is new by what is proposed before them.

    Args:
        import_path: of the class.
        settings: it is called with.

    Raises:
        OwnClassError: (a `ValueError`) if it cannot be imported or made, or proposes nothing.
    """

    reads_in_pieces = False

    def __init__(self, import_path: str, settings: OwnDrafterSettings) -> None:
        self._proposer: Proposer = make_own(import_path, "drafter", settings, ("propose",))
        self._guard = Guard(import_path, "drafter", self._proposer, "its requests go on without drafts")
        self._forget = getattr(self._proposer, "forget", None)
        self._num_scored = self._num_agreed = 0
        super().__init__(
            Capabilities(
                kind="own",
                max_depth=settings.max_depth,
                max_width=settings.max_width,
                has_probabilities=False,
                needs_prefill=False,
                vocab_size=settings.vocab_size,
                max_tokens=settings.max_tokens,
            )
        )

    def _open(self, spec: RequestSpec, before: _Held | None) -> _Held:
        return _Held(spec=spec, tokens=[])

    def _read(self, held: _Held, kept: int, new: list[int]) -> tuple[int, int]:
        if kept < len(held.tokens):
            del held.tokens[kept:]
            held.expected = None
        num_scored = num_agreed = 0
        for token in new:
            if held.expected is None:
                break
            num_scored += 1
            if not held.expected or held.expected[0] != token:
                held.expected = None
                break
            num_agreed += 1
            held.expected = held.expected[1:] or None  # beyond it nothing was proposed
        held.tokens += new
        self._num_scored += num_scored
        self._num_agreed += num_agreed
        return num_scored, num_agreed

    def _begin(
        self, item: DraftItem, held: _Held, plan: DraftPlan, num_scored: int, num_agreed: int
    ) -> Draft:
        tree, held.expected = TokenTree.root_only(held.tokens[-1]), None
        if plan.depth:
            tree = self._proposed(item.request_id, held.tokens, plan)
            held.expected = _first_choices(tree)
        elif not item.plan.depth:
            # What was proposed last has judged the first of the new tokens.
            read, agreed = self._judged(held, 0 if item.spec else item.start + num_scored)
            num_scored, num_agreed = num_scored + read, num_agreed + agreed
        return Draft(request_id=item.request_id, tree=tree, num_scored=num_scored, num_agreed=num_agreed)

    def _drafts(self, call: DraftCall, begun: Sequence[Draft]) -> list[Draft]:
        return list(begun)

    def _released(self, ended: Sequence[_Held]) -> None:
        if self._forget is None:
            return
        for held in ended:
            with self._guard.during("`forget`"):
                self._forget(held.spec.request_id)

    def _judged(self, held: _Held, since: int) -> tuple[int, int]:
        """Of an output's last tokens, from `since` on, how many were scored and how many agreed."""
        tokens, until = held.tokens, perf_counter() + READ_S
        at = max(held.spec.prompt_len, len(tokens) - READ_TOKENS, since)
        num_scored = num_agreed = 0
        while at < len(tokens) and (not num_scored or perf_counter() < until):
            plan = DraftPlan(depth=min(self._capabilities.max_depth, len(tokens) - at))
            expected = _first_choices(self._proposed(held.spec.request_id, tokens[:at], plan))
            agreed = sum(
                1
                for _ in takewhile(lambda pair: pair[0] == pair[1], zip(expected, tokens[at:], strict=False))
            )
            # The first that was not said is judged as well; beyond a proposal that came true nothing was.
            scored = max(1, agreed + (agreed < len(expected)))
            num_agreed += agreed
            num_scored += scored
            at += scored
        self._num_scored += num_scored
        self._num_agreed += num_agreed
        return num_scored, num_agreed

    def _proposed(self, request_id: str, tokens: list[int], plan: DraftPlan) -> TokenTree:
        """What may follow; the root alone where the class fails."""
        with self._guard.during("`propose`"):
            proposed = self._proposer.propose(request_id, _View(tokens), plan.depth, plan.width)
            return self._checked(proposed, tokens[-1], plan)
        return TokenTree.root_only(tokens[-1])

    def _checked(self, proposed: Sequence[int] | TokenTree, root: int, plan: DraftPlan) -> TokenTree:
        """The proposal as a tree within the plan; raises `OwnClassError` for what is none."""
        if isinstance(proposed, TokenTree):
            tree = proposed
            integers = (tree.token, tree.parent, tree.depth)
            # Others pass for such here, and are none where they are sent to.
            if not (all(_is_of(array, "iu") for array in integers) and _is_of(tree.logp, "iuf")):
                raise OwnClassError(
                    "`propose` answered a tree whose token, parent and depth are not all arrays of integers, "
                    "and logp one of real numbers; `TokenTree.of` makes such of lists"
                )
        else:
            rate = log((self._num_agreed + 1) / (self._num_scored + 2))
            chain = [_token(token) for token in list(proposed)[: plan.depth]]
            tree = TokenTree.chain(root, chain, [rate] * len(chain))
        try:
            tree.validate()
        except ValueError as error:
            raise OwnClassError(f"`propose` answered what is no token tree: {error}") from None
        if tree.token[0] != root:
            raise OwnClassError(
                f"`propose` answered a tree whose root is {tree.token[0]}, where the last token is {root}"
            )
        outside = tree.token[(tree.token < 0) | (tree.token >= self._capabilities.vocab_size)]
        if len(outside):
            raise OwnClassError(
                f"`propose` answered the token {outside[0]}, where ids are from 0 to "
                f"{self._capabilities.vocab_size - 1}"
            )
        if tree.logp[0] != 0.0:
            raise OwnClassError(
                f"`propose` answered {tree.logp[0]} as log-probability of the root, which is 0"
            )
        if len(tree) > 1 and not (tree.logp[1:] <= tree.logp[tree.parent[1:]]).all():
            raise OwnClassError("`propose` answered log-probabilities that rise along a path, or are none")
        return _within(tree, plan)


def _within(tree: TokenTree, plan: DraftPlan) -> TokenTree:
    """Of each layer the first nodes that the plan has a place for, whose parents are among them.

    Those of no probability at all are left out: what follows them would have any.
    """
    layers = [0] * (plan.depth + 1)
    kept = np.zeros(len(tree), dtype=np.bool_)
    for node, (parent, depth) in enumerate(zip(tree.parent.tolist(), tree.depth.tolist(), strict=True)):
        if not node or (
            kept[parent]
            and depth <= plan.depth
            and layers[depth] < plan.width
            and tree.logp[node] > -inf
            and tree.logp[node] >= plan.stop_logp
        ):
            kept[node] = True
            layers[depth] += 1
    return tree.subset(np.flatnonzero(kept).astype(np.int32))


def _first_choices(tree: TokenTree) -> list[int]:
    """The tokens along the best nodes."""
    path, node = [], 0
    while len(children := np.flatnonzero(tree.parent == node)):
        node = int(children[np.argmax(tree.logp[children])])
        path.append(int(tree.token[node]))
    return path


def _token(token: object) -> int:
    if isinstance(token, bool) or not isinstance(token, int | np.integer):
        raise OwnClassError(f"`propose` answered {token!r:.40}, where it is to answer token ids or a tree")
    return int(token)


def _is_of(array: object, kinds: str) -> bool:
    return isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind in kinds


class _View(Sequence[int]):
    """Tokens to look at: what a user's class does with them changes nothing here."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._tokens[index]

    def __len__(self) -> int:
        return len(self._tokens)
