"""Drafting from what was proposed beside the target: by Medusa-style heads (Cai et al. 2024), or by EAGLE-3.

Both read the target's hidden states, so they run beside it, in the step that makes those states
(`verifier.proposing`); what they propose comes back with the verdict and on to here. What is left is to
choose. A head's candidates are those of its layer whatever path leads there, so every tree is a part of their
Cartesian product. Medusa verifies one fixed part of it; here a beam of the plan's width takes the paths with
the highest sum of log-probabilities. EAGLE's candidates are a beam already, of which the plan may take less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from drafters.heard import Heard
from drafters.messages import Draft, DraftCall, DraftItem, DraftPlan
from drafters.modelless import ModellessDrafter
from drafters.protocol import Capabilities
from engine.proposed_growth import Growth, Layers, growth
from engine.sampling_params import RequestSpec
from engine.stop_rules import StopRule


@dataclass(slots=True)
class _Held(Heard):
    """What is kept of a request: besides its tokens, what the heads proposed and has not been scored yet."""

    stops: frozenset[int]
    proposed: Layers | None = None

    def score(self) -> tuple[int, int]:
        """How far first choices follow the tokens that came, as of `Layers.score`."""
        layers, self.proposed = self.proposed, None
        return (0, 0) if layers is None else layers.score(self.tokens[layers.position :])


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
        known = before.proposed if before is not None else None
        return _Held(spec, [], frozenset(spec.sampling.stop_token_ids), known)

    def _read(self, held: _Held, kept: int, new: list[int]) -> tuple[int, int]:
        held.tokens[kept:] = new
        return held.score()

    def _begin(
        self, item: DraftItem, held: _Held, plan: DraftPlan, num_scored: int, num_agreed: int
    ) -> _Drafting:
        proposals = item.proposals
        is_of_now = proposals is not None and proposals.position == len(held.tokens)
        held.proposed = Layers(proposals) if proposals is not None and is_of_now else None
        tree = growth(held.tokens[-1], plan, held.stops, held.proposed)
        return _Drafting(item.request_id, tree, num_scored, num_agreed)

    def _drafts(self, call: DraftCall, begun: Sequence[_Drafting]) -> list[Draft]:
        _grow([one.growth for one in begun], call.stop_rule)
        return [
            Draft(
                request_id=one.request_id,
                tree=one.growth.tree(),
                num_scored=one.num_scored,
                num_agreed=one.num_agreed,
            )
            for one in begun
        ]

    def _seconds_elsewhere(self, call: DraftCall) -> float:
        """Of making the proposals, in the target's process."""
        return sum(item.proposals.seconds for item in call.items if item.proposals is not None)


class _Drafting(NamedTuple):
    """One item of the call while its tree grows."""

    request_id: str
    growth: Growth
    num_scored: int
    num_agreed: int


def _grow(trees: Sequence[Growth], stop_rule: StopRule | None) -> None:
    """Grow all trees layer by layer, up to the layer after which `stop_rule` predicts no gain."""
    stopping = stop_rule.begin() if stop_rule is not None else None
    growing = trees
    while growing:
        growing = [one for one in growing if one.grow()]
        if stopping is None or not growing:
            continue
        stopping.correct([p for one in growing for p in one.last_acceptance()])
        if not stopping.pays([p for one in growing for p in one.open_acceptance()]):
            return
