"""Drafting from what was proposed beside the target: by Medusa-style heads (Cai et al. 2024), or by EAGLE-3.

Both read the target's hidden states, so they run beside it, in the step that makes those states
(`verifier.proposing`); what they propose comes back with the verdict and on to here. What is left is to
choose. A head's candidates are those of its layer whatever path leads there, so every tree is a part of their
Cartesian product. Medusa verifies one fixed part of it; here a beam of the plan's width takes the paths with
the highest sum of log-probabilities. EAGLE's candidates are a beam already, of which the plan may take less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from drafters.beam import Beam
from drafters.heard import Heard
from drafters.messages import Draft, DraftCall, DraftItem, DraftPlan
from drafters.modelless import ModellessDrafter
from drafters.protocol import Capabilities
from engine.proposals import Proposals
from engine.sampling_params import RequestSpec
from engine.stop_rules import StopRule
from engine.tree import TokenTree


@dataclass(slots=True)
class _Held(Heard):
    """What is kept of a request: besides its tokens, what the heads proposed and has not been scored yet."""

    stops: frozenset[int]
    proposals: Proposals | None = None

    def score(self) -> tuple[int, int]:
        """How far first choices follow the tokens that came: (scored, agreed).

        A chain of heads' first choices is scored up to its first error, like the draft it would have been: so
        the rate is that of drafted tokens, and falls as it should where later heads are weaker. In a beam the
        first choice after each token that came is scored, as far as the beam holds them.
        """
        proposals, self.proposals = self.proposals, None
        if proposals is None:
            return 0, 0
        scored = agreed = place = 0
        for layer, token in enumerate(self.tokens[proposals.position :][: len(proposals.token)]):
            choices = candidates(proposals, layer, place)
            if not choices:
                break
            scored += 1
            agreed += choices[0].token == token
            followed = [one.place for one in choices if one.token == token]
            if not followed or (proposals.parent is None and choices[0].token != token):
                break
            place = followed[0]
        return scored, agreed


class HeadsDrafter(ModellessDrafter["_Held", "_Drafting"]):
    """Drafts from the proposals that come with each item; without them, the root alone.

    It has no model, keeps no KV and imports no torch: what it costs is making the proposals, which it reports
    as its own time although it was spent in the target's process.
    """

    reads_in_pieces = False

    def __init__(
        self,
        *,
        num_heads: int,
        vocab_size: int,
        max_tokens: int,
        num_candidates: int = 4,
        max_width: int = 16,
        kind: Literal["heads", "eagle"] = "heads",
    ) -> None:
        """A drafter over `num_heads` heads, or layers of EAGLE's beams.

        Args:
            num_heads: layers of the deepest tree.
            vocab_size: of the target.
            max_tokens: longest sequence (prompt and output), in tokens.
            num_candidates: tokens of each layer that trees are made of.
            max_width: widest beam.
            kind: what proposes.
        """
        super().__init__(
            Capabilities(
                kind=kind,
                max_depth=num_heads,
                max_width=max_width,
                has_probabilities=True,
                needs_prefill=False,
                num_candidates=num_candidates,
                has_independent_layers=kind == "heads",
                vocab_size=vocab_size,
                max_tokens=max_tokens,
            )
        )

    def _open(self, spec: RequestSpec, before: _Held | None) -> _Held:
        known = before.proposals if before is not None else None
        return _Held(spec, [], frozenset(spec.sampling.stop_token_ids), known)

    def _read(self, held: _Held, kept: int, new: list[int]) -> tuple[int, int]:
        held.tokens[kept:] = new
        return held.score()

    def _begin(
        self, item: DraftItem, held: _Held, plan: DraftPlan, num_scored: int, num_agreed: int
    ) -> _Drafting:
        proposals = item.proposals
        if proposals is not None and proposals.position != len(held.tokens):
            proposals = None
        held.proposals = proposals
        beam = Beam(held.tokens[-1], plan, held.stops)
        return _Drafting(item.request_id, beam, proposals, num_scored, num_agreed)

    def _drafts(self, call: DraftCall, begun: Sequence[_Drafting]) -> list[Draft]:
        _grow(begun, call.stop_rule)
        return [one.draft() for one in begun]

    def _seconds_elsewhere(self, call: DraftCall) -> float:
        """Of making the proposals, in the target's process."""
        return sum(item.proposals.seconds for item in call.items if item.proposals is not None)


@dataclass(slots=True)
class _Drafting:
    """One item of the call while its tree grows."""

    request_id: str
    beam: Beam
    proposals: Proposals | None
    num_scored: int
    num_agreed: int
    # Per node of the beam, its place among its layer's candidates.
    places: list[int] = field(default_factory=lambda: [0])

    def grow(self) -> bool:
        """Add a layer, if there is one to add."""
        beam, proposals = self.beam, self.proposals
        if not beam.frontier or proposals is None or beam.depth >= min(beam.plan.depth, len(proposals.token)):
            return False
        layer, frontier = beam.depth, beam.frontier
        if proposals.parent is None:
            n = len(frontier)
            beam.grow([proposals.logp[layer].tolist()] * n, [proposals.token[layer].tolist()] * n)
            return bool(beam.layer)
        found = [candidates(proposals, layer, self.places[node]) for node in frontier]
        beam.grow([[one.logp for one in row] for row in found], [[one.token for one in row] for row in found])
        place: dict[tuple[int, int], int] = {}
        for node, row in zip(frontier, found, strict=True):
            for one in row:  # the best first: tokens that are ruled out may repeat it
                place.setdefault((node, one.token), one.place)
        self.places += [place[beam.parent[node], beam.token[node]] for node in beam.layer]
        return bool(beam.layer)

    def draft(self) -> Draft:
        return Draft(
            request_id=self.request_id,
            tree=self.beam.tree() if len(self.beam.token) > 1 else TokenTree.root_only(self.beam.token[0]),
            num_scored=self.num_scored,
            num_agreed=self.num_agreed,
        )


class Candidate(NamedTuple):
    """A token proposed, its log-probability given the path before, and its place in the layer."""

    token: int
    logp: float
    place: int


def candidates(proposals: Proposals, layer: int, parent: int) -> list[Candidate]:
    """Those of a layer (from 0) after the candidate at place `parent` of the layer before, the best first."""
    tokens, logps = proposals.token[layer].tolist(), proposals.logp[layer].tolist()
    found = [
        Candidate(token, logp, place) for place, (token, logp) in enumerate(zip(tokens, logps, strict=True))
    ]
    if proposals.parent is None:
        return found
    return [
        one for one, above in zip(found, proposals.parent[layer].tolist(), strict=True) if above == parent
    ]


def _grow(drafting: Sequence[_Drafting], stop_rule: StopRule | None) -> None:
    """Grow all trees layer by layer, up to the layer after which `stop_rule` predicts no gain."""
    stopping = stop_rule.begin() if stop_rule is not None else None
    growing: Sequence[_Drafting] = drafting
    while growing:
        growing = [one for one in growing if one.grow()]
        if stopping is None or not growing:
            continue
        stopping.correct([p for one in growing for p in one.beam.acceptance(one.beam.layer)])
        if not stopping.pays([p for one in growing for p in one.beam.acceptance(one.beam.frontier)]):
            return
