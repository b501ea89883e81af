"""A model drafter with another tokenizer than the target's: the two exchange text.

Committed tokens are spelled in the drafter's vocabulary, a beam is drafted there, and its paths are spelled
in the target's (`drafters.retokenized_text`). The model drafter inside knows nothing of it: where the
spelling changes it is told other tokens from that position on, and rolls its KV back to there.

The noise of a sampling request belongs to the target's tokens and has no counterpart in another vocabulary.
So such requests are drafted for greedily, and fewer tokens are accepted than of a coupled draft. Penalties
and biases are the target's business alone too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from pathlib import Path
from time import perf_counter

import msgspec
import numpy as np

from drafters.heard import Heard, fit_plan, news
from drafters.messages import Draft, DraftCall, DraftItem, DraftPlan, DraftResult
from drafters.protocol import Capabilities, Drafter
from drafters.retokenize_vocabulary import Vocabulary
from drafters.retokenized_text import Pair, RetokenizedText, drafted_tokens
from engine.sampling_params import RequestSpec, SamplingParams
from engine.tree import TokenTree

_ENDLESS = 1 << 30  # the bound on the output is kept in the target's tokens
_NO_TOKENS = np.zeros(0, dtype=np.int32)


@dataclass(slots=True)
class _Held(Heard):
    """A request: the target's tokens, and the same text in the drafter's.

    Attributes:
        text: the drafter's tokens.
        stops: the target's tokens that end generation.
        prompt_ids: how many of the drafter's tokens the prompt was.
        can_be_spelled: whether the drafter has tokens for all of it.
        is_open: whether the inner drafter holds it.
    """

    text: RetokenizedText
    stops: frozenset[int]
    prompt_ids: int = 0
    can_be_spelled: bool = True
    is_open: bool = False


class RetokenizingDrafter:
    """Drafts in the target's vocabulary with a drafter of another one."""

    def __init__(self, inner: Drafter, pair: Pair, vocab_size: int) -> None:
        """Wrap a drafter.

        Args:
            inner: drafts in its own vocabulary; deep enough to spell the deepest plan.
            pair: the vocabularies.
            vocab_size: of the target.
        """
        self._inner, self._pair = inner, pair
        self._held: dict[str, _Held] = {}
        self._release: list[str] = []  # owed to the inner drafter
        self._capabilities = msgspec.structs.replace(
            inner.capabilities, kind="retokenized_model", vocab_size=vocab_size
        )

    @classmethod
    def of(cls, inner: Drafter, target: Path, drafter: Path, vocab_size: int) -> RetokenizingDrafter:
        """Wrap a drafter; the tokenizers are those of two Hugging Face directories.

        Raises:
            FileNotFoundError, ValueError: as `Vocabulary`.
        """
        return cls(inner, Pair.of(Vocabulary(target), Vocabulary(drafter)), vocab_size)

    @property
    def capabilities(self) -> Capabilities:
        """What this drafter can do; `max_tokens` is an upper bound, for the inner drafter counts its own."""
        return self._capabilities

    def draft(self, call: DraftCall) -> DraftResult:
        """Draft for every item of the call; a request not held at the position named goes to `unknown`.

        The call's stop rule is not asked: it counts layers of the target's tokens, of which there are none
        before all is drafted. A plan's thresholds hold for the drafter's own tokens.
        """
        started = perf_counter()
        for request_id in call.release:
            self._forget(request_id)
        unknown: list[str] = []
        served: list[tuple[DraftItem, _Held, int]] = []
        items: list[DraftItem] = []
        for item in call.items:
            heard = self._hear(item)
            if heard is None:
                unknown.append(item.request_id)
                continue
            served.append((item, *heard))
            held = heard[0]
            if held.can_be_spelled and held.text.ids:
                items.append(self._inner_item(item, held))
        release, self._release = self._release, []
        result = self._inner.draft(
            DraftCall(call_id=call.call_id, items=items, release=release, ahead_s=call.ahead_s)
        )
        inner = {draft.request_id: draft for draft in result.drafts}
        for request_id in result.unknown:  # evicted for lack of slots
            del self._held[request_id]
        return DraftResult(
            call_id=call.call_id,
            drafts=[
                self._draft(item, held, num_new, inner.get(item.request_id))
                for item, held, num_new in served
                if item.request_id in self._held
            ],
            unknown=unknown + result.unknown,
            seconds=perf_counter() - started,
            forward_seconds=result.forward_seconds,
            num_forwards=result.num_forwards,
        )

    def draft_ahead(self) -> bool:
        """What the inner drafter does between calls."""
        return self._inner.draft_ahead()

    def _forget(self, request_id: str) -> None:
        held = self._held.pop(request_id, None)
        if held is not None and held.is_open:
            self._release.append(request_id)

    def _hear(self, item: DraftItem) -> tuple[_Held, int] | None:
        """Take in the item's tokens: the request and how many output tokens were new; None if unknown."""
        held = self._held.get(item.request_id)
        change = news(held, item)
        if change is None:
            return None
        kept, new = change
        if item.spec is not None:
            self._forget(item.request_id)
            prompt = new[: item.spec.prompt_len]
            held = _Held(
                spec=item.spec,
                tokens=list(prompt),
                text=RetokenizedText(self._pair),
                stops=frozenset(item.spec.sampling.stop_token_ids),
            )
            self._held[item.request_id] = held
            held.can_be_spelled = held.text.append(prompt)
            held.prompt_ids = len(held.text.ids)
            new = new[len(prompt) :]
        elif held is None:
            return None
        elif kept < len(held.tokens):
            del held.tokens[kept:]
            held.can_be_spelled = held.text.start_over(held.tokens)
        held.tokens += new
        held.can_be_spelled = held.can_be_spelled and held.text.append(new)
        return held, min(len(new), max(0, len(held.tokens) - held.spec.prompt_len))

    def _inner_item(self, item: DraftItem, held: _Held) -> DraftItem:
        """What the inner drafter is told of the item."""
        start, ids = held.text.report()
        plan = self._inner_plan(fit_plan(item.plan, held, self._capabilities), held)
        if held.is_open:
            tokens = np.array(ids, dtype=np.int32)
            return DraftItem(request_id=item.request_id, start=start, tokens=tokens, plan=plan)
        held.is_open = True
        counterparts = self._pair.to_drafter
        spec = RequestSpec(
            request_id=item.request_id,
            tokens=list(held.text.ids),
            prompt_len=held.prompt_ids,
            sampling=SamplingParams(
                temperature=0.0,
                max_tokens=_ENDLESS,
                stop_token_ids=tuple(counterparts[stop] for stop in held.stops if stop in counterparts),
            ),
            cache_salt=held.spec.cache_salt,
        )
        return DraftItem(request_id=item.request_id, start=0, tokens=_NO_TOKENS, plan=plan, spec=spec)

    def _inner_plan(self, plan: DraftPlan, held: _Held) -> DraftPlan:
        """Deep enough to spell as many of the target's tokens, and one more token that confirms them."""
        if not plan.depth:
            return plan
        per_token = len(held.text.ids) / len(held.tokens)
        return msgspec.structs.replace(plan, depth=ceil(plan.depth * per_token) + 1)

    def _draft(self, item: DraftItem, held: _Held, num_new: int, inner: Draft | None) -> Draft:
        """The candidate tree in the target's tokens; the root alone if there is none in the drafter's.

        A token of the target agreed if all of the drafter's that spell it did. Of these only the number is
        known, so each that did not is taken to have spoilt a token of its own.
        """
        root = held.tokens[-1]
        if inner is None:
            return Draft(request_id=item.request_id, tree=TokenTree.root_only(root))
        plan = fit_plan(item.plan, held, self._capabilities)
        missed = inner.num_scored - inner.num_agreed
        return Draft(
            request_id=item.request_id,
            tree=self._tree(inner.tree, root, plan, held.stops),
            num_scored=num_new if inner.num_scored else 0,
            num_agreed=max(0, num_new - missed) if inner.num_scored else 0,
        )

    def _tree(self, inner: TokenTree, root: int, plan: DraftPlan, stops: frozenset[int]) -> TokenTree:
        """All paths of the inner tree, most probable first, merged within the plan's depth and width."""
        token, parent, logp, depth = [root], [-1], [0.0], [0]
        children: list[dict[int, int]] = [{}]
        layer_sizes = [1] + [0] * plan.depth
        inner_parent = inner.parent.tolist()
        leaves = set(range(1, len(inner))) - set(inner_parent)
        for leaf in sorted(leaves, key=lambda node: (-float(inner.logp[node]), node)):
            path = inner.path(leaf)[1:]
            tokens, logps = inner.token[path].tolist(), inner.logp[path].tolist()
            drafted = drafted_tokens(self._pair, tokens, logps)
            node = 0
            for child_token, value in zip(drafted.tokens[: plan.depth], drafted.logps, strict=False):
                child = children[node].get(child_token)
                if child is None:
                    if layer_sizes[depth[node] + 1] >= plan.width:
                        break
                    child = children[node][child_token] = len(token)
                    token.append(child_token)
                    parent.append(node)
                    logp.append(value)
                    depth.append(depth[node] + 1)
                    children.append({})
                    layer_sizes[depth[child]] += 1
                elif value > logp[child]:
                    logp[child] = value  # settled here, as it was not by a likelier path that ends with it
                if child_token in stops:
                    break
                node = child
        return TokenTree.of(token, parent, logp, depth)
