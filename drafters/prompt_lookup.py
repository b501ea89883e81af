"""Prompt lookup: draft what followed the present suffix when it occurred before (A. Saxena, 2023).

It costs no model and does best where output repeats input: editing, extraction, summaries, code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from drafters.heard import Heard
from drafters.messages import Draft, DraftCall, DraftItem, DraftPlan
from drafters.modelless import ModellessDrafter
from drafters.ngram_index import NgramIndex
from drafters.protocol import Capabilities
from engine.sampling_params import RequestSpec
from engine.tree import TokenTree

_PRIOR_WEIGHT = 4.0  # tokens of a request's own record that weigh as much as the record of all requests


class _Record:
    """How often first choices agreed with the committed token, by length of the suffix matched."""

    def __init__(self, max_ngram: int, prior: _Record | None = None) -> None:
        self._scored = [0] * (max_ngram + 1)
        self._agreed = [0] * (max_ngram + 1)
        self._prior = prior

    def add(self, n: int, agreed: bool) -> None:
        self._scored[n] += 1
        self._agreed[n] += agreed
        if self._prior is not None:
            self._prior.add(n, agreed)

    def rate(self, n: int) -> float:
        """Estimated agreement after a match of n tokens, strictly inside (0, 1).

        Laplace's rule over all requests, and that as prior of the request's own counts.
        """
        if self._prior is None:
            return (self._agreed[n] + 1) / (self._scored[n] + 2)
        prior = _PRIOR_WEIGHT * self._prior.rate(n)
        return (self._agreed[n] + prior) / (self._scored[n] + _PRIOR_WEIGHT)


@dataclass(slots=True)
class _Held(Heard):
    index: NgramIndex
    record: _Record
    stops: frozenset[int]


class PromptLookupDrafter(ModellessDrafter[_Held, Draft]):
    """Drafts continuations of earlier occurrences of the present suffix.

    The first continuation is that of the longest matching suffix's most recent occurrence; plans wider
    than 1 merge further, distinct ones into a tree, longest and most recent first, at most `width` nodes
    per layer. A continuation that reaches the end of the sequence goes on with itself, as in LZ77, so that
    a repetition is drafted to any depth.

    `logp` is an estimate from how often matches of that length were right so far (`_Record.rate`): each
    step along a continuation counts as a match one token longer, and the k-th child of a node (from 0) gets
    `rate * (1 - rate)**k`, the chance that it is right and those before it are not.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_tokens: int,
        max_ngram: int = 4,
        min_ngram: int = 1,
        max_depth: int = 16,
        max_width: int = 8,
    ) -> None:
        """A drafter that matches suffixes of min_ngram .. max_ngram tokens.

        Args:
            vocab_size: of the target.
            max_tokens: longest sequence (prompt and output), in tokens.
            max_ngram, min_ngram: lengths of the suffixes looked up.
            max_depth, max_width: bounds of every plan; larger plans are cut down to them.

        Raises:
            ValueError: unless 1 <= min_ngram <= max_ngram.
        """
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"need 1 <= min_ngram <= max_ngram, not {min_ngram} and {max_ngram}")
        self._min_ngram, self._max_ngram = min_ngram, max_ngram
        self._record = _Record(max_ngram)
        super().__init__(
            Capabilities(
                kind="prompt_lookup",
                max_depth=max_depth,
                max_width=max_width,
                has_probabilities=False,
                needs_prefill=False,
                vocab_size=vocab_size,
                max_tokens=max_tokens,
            )
        )

    def _open(self, spec: RequestSpec, before: _Held | None) -> _Held:
        index = NgramIndex(self._min_ngram, self._max_ngram)
        return _Held(
            spec=spec,
            tokens=index.tokens,
            index=index,
            record=_Record(self._max_ngram, self._record),
            stops=frozenset(spec.sampling.stop_token_ids),
        )

    def _read(self, held: _Held, kept: int, new: list[int]) -> tuple[int, int]:
        # A committed output token counts as scored also where no suffix matched: nothing would have been
        # drafted there, so it counts as not agreed.
        if kept < len(held.tokens):
            held.index.truncate(kept)
        num_scored = num_agreed = 0
        for token in new:
            if len(held.tokens) >= held.spec.prompt_len:
                num_scored += 1
                num_agreed += _score(held, token)
            held.index.append(token)
        return num_scored, num_agreed

    def _begin(
        self, item: DraftItem, held: _Held, plan: DraftPlan, num_scored: int, num_agreed: int
    ) -> Draft:
        return Draft(
            request_id=item.request_id,
            tree=_Trie(held, plan, self._max_ngram).tree(),
            num_scored=num_scored,
            num_agreed=num_agreed,
        )

    def _drafts(self, call: DraftCall, begun: Sequence[Draft]) -> list[Draft]:
        return list(begun)


def _score(held: _Held, token: int) -> bool:
    """Whether `token`, committed next, is the first choice; kept on record if there was one."""
    for n, position in held.index.matches():
        agreed = held.tokens[position] == token
        held.record.add(n, agreed)
        return agreed
    return False


class _Trie:
    """Continuations merged into one candidate tree, in order of preference."""

    def __init__(self, held: _Held, plan: DraftPlan, max_ngram: int) -> None:
        self._held, self._plan, self._max_ngram = held, plan, max_ngram
        self._token, self._parent, self._logp, self._depth = [held.tokens[-1]], [-1], [0.0], [0]
        self._children: list[dict[int, int]] = [{}]
        self._layer_sizes = [1] + [0] * plan.depth
        if plan.depth:
            for n, position in held.index.matches():
                self._add(n, position)
                if min(self._layer_sizes[1:]) >= plan.width:
                    break

    def _add(self, n: int, position: int) -> None:
        """Follow or add nodes for the tokens from `position` on, after a match of `n` tokens."""
        held, plan = self._held, self._plan
        period = len(held.tokens) - position
        node = 0
        for depth in range(1, plan.depth + 1):
            token = held.tokens[position + (depth - 1) % period]
            children = self._children[node]
            child = children.get(token)
            if child is None:
                if self._layer_sizes[depth] >= plan.width:
                    return
                rate = held.record.rate(min(n + depth - 1, self._max_ngram))
                logp = self._logp[node] + log(rate) + len(children) * log(1 - rate)
                child = children[token] = len(self._token)
                self._token.append(token)
                self._parent.append(node)
                self._logp.append(logp)
                self._depth.append(depth)
                self._children.append({})
                self._layer_sizes[depth] += 1
            if token in held.stops or self._logp[child] < plan.stop_logp:
                return
            node = child

    def tree(self) -> TokenTree:
        return TokenTree.of(self._token, self._parent, self._logp, self._depth)
