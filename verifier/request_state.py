"""What the verifier remembers of a request besides its KV slots."""

from __future__ import annotations

from collections.abc import Sequence

from engine.draft_plan import DraftPlan
from engine.grammar import GrammarError, Grammars
from engine.mask_bits import TokenMask
from engine.matcher import Matcher
from engine.proposals import Proposals
from engine.proposed_growth import grown
from engine.runner import ModelShape
from engine.sampling import Row, TokenHistory
from engine.sampling_params import RequestSpec
from engine.thoughtful_grammar import matcher_of
from engine.tree import TokenTree
from verifier.constrained import Bounds, MaskedTree, mask_tree
from verifier.slow_masks import SlowMasks


class RequestState:
    """Known sequence of one request: prompt and committed output. All of it is soft state (design, idea 3).

    Attributes:
        request_id: unique within the cell.
        tokens: prompt and output committed so far; the last one is the root of the next tree and has no
            KV yet.
        prompt_len: how many of `tokens` are the prompt.
        params: how tokens are chosen.
        matcher: follows the output through the grammar of a request that has a constraint.
        is_prefilled: whether all it was opened with was read, and a token decided.
        proposals: what was proposed with its last verdict, if anything was.
        adapter: number of the LoRA adapter that it is computed with, 0 for none.
        namespace: of the prefixes that it may share.
        slow_masks: how long the masks of a request with a constraint take.
    """

    __slots__ = (
        "_history",
        "_max_output",
        "_row",
        "_stop",
        "adapter",
        "is_prefilled",
        "matcher",
        "namespace",
        "params",
        "prompt_len",
        "proposals",
        "request_id",
        "slow_masks",
        "tokens",
    )

    def __init__(
        self,
        spec: RequestSpec,
        shape: ModelShape,
        grammars: Grammars | None = None,
        adapters: Sequence[str] = (),
    ) -> None:
        """Start from `spec`; `grammars` are needed if it has a constraint, `adapters` if it has one.

        Raises:
            ValueError: if the sequence cannot be run by the model of `shape`, or its adapter is not there.
        """
        if spec.adapter and spec.adapter not in adapters:
            raise ValueError(f"there is no adapter {spec.adapter!r}")
        if not 1 <= spec.prompt_len <= len(spec.tokens):
            raise ValueError(f"prompt of {spec.prompt_len} among {len(spec.tokens)} tokens")
        if len(spec.tokens) > shape.max_tokens:
            raise ValueError(f"{len(spec.tokens)} tokens; the model takes {shape.max_tokens}")
        if min(spec.tokens) < 0 or max(spec.tokens) >= shape.vocab_size:
            raise ValueError("token id outside the vocabulary")
        self.request_id = spec.request_id
        self.adapter = adapters.index(spec.adapter) + 1 if spec.adapter else 0
        self.namespace = spec.namespace
        self.is_prefilled = False
        self.proposals: Proposals | None = None
        self.tokens = list(spec.tokens)
        self.prompt_len = spec.prompt_len
        self.params = spec.sampling
        self._stop = frozenset(spec.sampling.stop_token_ids)
        # The last row a model can run is at position max_tokens - 1 and decides one token more.
        self._max_output = min(spec.sampling.max_tokens, shape.max_tokens + 1 - spec.prompt_len)
        self._history = (
            TokenHistory(self.tokens[: self.prompt_len], self.tokens[self.prompt_len :])
            if self.params.needs_history
            else None
        )
        # The decision wherever it is the same at all positions.
        is_anywhere = self.is_plain and self.params.is_greedy and not self.params.min_tokens
        self._row = Row(self.params, 0) if is_anywhere else None
        self.slow_masks = SlowMasks()
        self.matcher: Matcher | None = None
        if self.params.constraint is not None and grammars is not None:
            self.matcher = matcher_of(grammars, self.params.constraint, self.tokens[self.prompt_len :])

    def same_as(self, spec: RequestSpec) -> bool:
        """Whether `spec` describes exactly this state."""
        return (
            self.prompt_len == spec.prompt_len
            and self.params == spec.sampling
            and self.namespace == spec.namespace
            and self.tokens == spec.tokens
        )

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens after which it ends."""
        return self._stop

    @property
    def num_output(self) -> int:
        """Output tokens committed so far; also the output position of the next one."""
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """How many more tokens may be committed."""
        return self._max_output - self.num_output

    @property
    def is_stopped(self) -> bool:
        """Whether a stop token ended its output, as the scheduler judges."""
        if not self.num_output or self.tokens[-1] not in self._stop:
            return False
        # A grammar may leave nothing but a stop token before `min_tokens`.
        return self.num_output > self.params.min_tokens or self.params.constraint is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are due; who has output got them before it."""
        return self.params.prompt_logprobs is not None and self.num_output == 0

    def masked(self, tree: TokenTree, max_forced: int = 0) -> MaskedTree | None:
        """`tree` as the grammar leaves it, with at most `max_forced` nodes added; None without a constraint.

        Raises:
            GrammarError: if the grammar cannot be followed.
        """
        if self.params.constraint is None:
            return None
        if self.matcher is None:
            raise GrammarError("this target has no tokenizer that grammars could be compiled for")
        began = self.slow_masks.begin()
        bounds = Bounds(
            position=self.num_output,
            min_tokens=self.params.min_tokens,
            stop=self._stop,
            max_depth=self.remaining - 1,
            max_forced=max_forced,
        )
        found = mask_tree(self.matcher, tree, bounds)
        if self.is_prefilled:  # before, a copy of the grammar may have been made, and all output read
            self.slow_masks.end(began, len(found.tree))
        return found

    def rows(self, tree: TokenTree, masks: Sequence[TokenMask] | None = None) -> list[Row]:
        """The decision to take at each node of `tree`, whose root is the last known token.

        Args:
            tree: the draft tree.
            masks: per node, what the grammar allows after it, if there is one.
        """
        if self._row is not None:
            return [self._row] * len(tree.token)
        first = self.num_output
        if len(tree) == 1 and self._history is None:
            return [Row(self.params, first, allowed=masks[0] if masks is not None else None)]
        depths = tree.depth.tolist()
        allowed: Sequence[TokenMask | None] = masks if masks is not None else [None] * len(depths)
        if self._history is None:
            return [
                Row(self.params, first + depth, allowed=mask)
                for depth, mask in zip(depths, allowed, strict=True)
            ]
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.token.tolist()[1:], tree.parent.tolist()[1:], strict=True):
            paths.append((*paths[parent], token))
        return [
            Row(self.params, first + depth, self._history, path, mask)
            for depth, path, mask in zip(depths, paths, allowed, strict=True)
        ]

    def proposed_tree(self, plan: DraftPlan) -> TokenTree:
        """The tree of this shape from what was proposed after its last token; the root alone without."""
        proposals = self.proposals
        if proposals is not None and proposals.position != len(self.tokens):
            proposals = None
        return grown(self.tokens[-1], plan, self._stop, proposals)

    def rows_ahead(self, tokens: Sequence[int], num_ahead: int) -> list[Row]:
        """The decisions at the `num_ahead` output positions after `tokens`, which are about to be committed.

        What will be committed in between is not known: penalties and bad words see `tokens` and what came
        before.
        """
        first, path = self.num_output + len(tokens), tuple(tokens)
        return [Row(self.params, first + i, self._history, path) for i in range(num_ahead)]

    @property
    def is_plain(self) -> bool:
        """Whether the decision after a token needs nothing of it but the model's logits."""
        return self._history is None and self.params.constraint is None

    def row_after_next(self) -> Row:
        """The decision after the one that is being taken, of a request that `is_plain`."""
        return Row(self.params, self.num_output + 1)

    def goes_on_after(self, tokens: Sequence[int]) -> bool:
        """Whether more tokens may follow once `tokens`, at least one, are committed."""
        return bool(tokens) and self.remaining > len(tokens) and tokens[-1] not in self._stop

    def cut(self, tokens: Sequence[int]) -> int:
        """How many of the decided `tokens` are committed: up to the first stop token or `max_tokens`."""
        allowed = max(0, min(len(tokens), self.remaining))
        for i in range(allowed):
            if tokens[i] in self._stop:
                return i + 1
        return allowed

    def extend(self, tokens: Sequence[int]) -> None:
        """Commit output tokens."""
        self.tokens.extend(tokens)
        if self._history is not None:
            self._history.extend(tokens)
        if self.matcher is not None:
            self.matcher.advance(tokens)
