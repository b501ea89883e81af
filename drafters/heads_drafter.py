"""Medusa-style heads as a drafter: trees over what the target's own heads proposed (Cai et al. 2024).

The heads read the target's hidden states, so they are evaluated beside it, in the step that makes those
states (`verifier.proposing`); what they propose comes back with the verdict and on to here. What is left is
to choose: head i's candidates are those of layer i whatever path leads there, so every tree is a part of
their Cartesian product. Medusa verifies one fixed part of it; here a beam of the plan's width takes the paths
with the highest sum of log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from drafters.beam import Beam
from drafters.heard import Heard, fit_plan, news
from drafters.messages import Draft, DraftCall, DraftItem, DraftResult
from drafters.protocol import Capabilities
from drafters.stop_rules import AdaptiveDrafter, StopRule
from engine.proposals import Proposals
from engine.tree import TokenTree


@dataclass(slots=True)
class _Held(Heard):
    """What is kept of a request: besides its tokens, what the heads proposed and has not been scored yet."""

    stops: frozenset[int]
    proposals: Proposals | None = None

    def score(self) -> tuple[int, int]:
        """How far the heads' first choices follow the tokens that came: (scored, agreed).

        A chain of first choices is scored up to its first error, like the draft it would have been: so the
        rate is that of drafted tokens, and falls as it should where later heads are weaker.
        """
        proposals, self.proposals = self.proposals, None
        if proposals is None:
            return 0, 0
        scored = agreed = 0
        for choice, token in zip(
            proposals.token[:, 0].tolist(), self.tokens[proposals.position :], strict=False
        ):
            scored += 1
            if choice != token:
                break
            agreed += 1
        return scored, agreed


class HeadsDrafter:
    """Drafts from the proposals that come with each item; without them, the root alone.

    It has no model, keeps no KV and imports no torch: what it costs is evaluating the heads, which it reports
    as its own time although it was spent in the target's process.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        vocab_size: int,
        max_tokens: int,
        num_candidates: int = 4,
        max_width: int = 16,
    ) -> None:
        """A drafter over `num_heads` heads.

        Args:
            num_heads: layers of the deepest tree.
            vocab_size: of the target.
            max_tokens: longest sequence (prompt and output), in tokens.
            num_candidates: tokens of each head that trees are made of.
            max_width: widest beam.
        """
        self._held: dict[str, _Held] = {}
        self._capabilities = Capabilities(
            kind="heads",
            max_depth=num_heads,
            max_width=max_width,
            has_probabilities=True,
            needs_prefill=False,
            num_candidates=num_candidates,
            vocab_size=vocab_size,
            max_tokens=max_tokens,
        )

    @property
    def capabilities(self) -> Capabilities:
        """What this drafter can do."""
        return self._capabilities

    def draft(self, call: DraftCall) -> DraftResult:
        """Draft for every item of the call; a request not held at the position named goes to `unknown`."""
        started = perf_counter()
        for request_id in call.release:
            self._held.pop(request_id, None)
        drafting: list[_Drafting] = []
        unknown: list[str] = []
        for item in call.items:
            found = self._begin(item)
            if found is None:
                unknown.append(item.request_id)
            else:
                drafting.append(found)
        _grow(drafting, call.stop_rule)
        evaluating = sum(item.proposals.seconds for item in call.items if item.proposals is not None)
        return DraftResult(
            call_id=call.call_id,
            drafts=[one.draft() for one in drafting],
            unknown=unknown,
            seconds=perf_counter() - started + evaluating,
            forward_seconds=evaluating,
            num_forwards=1 if evaluating else 0,
        )

    def draft_ahead(self) -> bool:
        """Nothing: the heads have said what they have to say."""
        return False

    def _begin(self, item: DraftItem) -> _Drafting | None:
        held = self._held.get(item.request_id)
        change = news(held, item)
        if change is None:
            return None
        kept, new = change
        if item.spec is not None:
            known = held.proposals if held is not None else None
            held = _Held(item.spec, [], frozenset(item.spec.sampling.stop_token_ids), known)
            self._held[item.request_id] = held
        if held is None:
            return None
        held.tokens[kept:] = new
        num_scored, num_agreed = held.score()
        proposals = item.proposals
        if proposals is not None and proposals.position != len(held.tokens):
            proposals = None
        held.proposals = proposals
        plan = fit_plan(item.plan, held, self._capabilities)
        return _Drafting(
            item.request_id, Beam(held.tokens[-1], plan, held.stops), proposals, num_scored, num_agreed
        )


@dataclass(slots=True)
class _Drafting:
    """One item of the call while its tree grows."""

    request_id: str
    beam: Beam
    proposals: Proposals | None
    num_scored: int
    num_agreed: int

    def grow(self) -> bool:
        """Add a layer, if there is one to add."""
        beam, proposals = self.beam, self.proposals
        if not beam.frontier or proposals is None or beam.depth >= min(beam.plan.depth, len(proposals.token)):
            return False
        n = len(beam.frontier)
        beam.grow([proposals.logp[beam.depth].tolist()] * n, [proposals.token[beam.depth].tolist()] * n)
        return bool(beam.layer)

    def draft(self) -> Draft:
        return Draft(
            request_id=self.request_id,
            tree=self.beam.tree() if len(self.beam.token) > 1 else TokenTree.root_only(self.beam.token[0]),
            num_scored=self.num_scored,
            num_agreed=self.num_agreed,
        )


def _grow(drafting: list[_Drafting], stop_rule: StopRule | None) -> None:
    """Grow all trees layer by layer, up to the layer after which `stop_rule` predicts no gain."""
    adaptive = AdaptiveDrafter(stop_rule) if stop_rule is not None else None
    growing = drafting
    while growing:
        growing = [one for one in growing if one.grow()]
        if adaptive is None or not growing:
            continue
        adaptive.correct([p for one in growing for p in one.beam.acceptance(one.beam.layer)])
        if not adaptive.pays([p for one in growing for p in one.beam.acceptance(one.beam.frontier)]):
            return
