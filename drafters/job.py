"""State of a model drafter: what it keeps of a request, and one item while it is served."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from drafters.computed_tree import ROOT, ComputedTree
from drafters.heard import Heard
from drafters.next_tokens import Ranking
from drafters.noise_window import NoiseWindow
from engine.beam import Beam
from engine.sampling import Row, TokenHistory
from engine.sampling_params import RequestSpec

Int32 = NDArray[np.int32]

SCORED_WITH_PENALTIES = 64
MOST_IN_WINDOW = 16


def _no_slots() -> Int32:
    return np.zeros(0, dtype=np.int32)


@dataclass(slots=True)
class Held(Heard):
    """Everything kept of a request between calls, its KV apart.

    Attributes:
        stops: tokens that end generation.
        is_plain: whether tokens are ranked by the model's own logits: greedy and nothing that shifts them.
        noise: of a sampling request.
        is_foreign: whether some token is not in the drafter's vocabulary, so that it cannot follow.
        scored: committed tokens before this position are not scored (again).
        tree: what is computed beyond the last token heard, whose slots stay reserved until the next call;
            None if nothing is.
    """

    stops: frozenset[int]
    is_plain: bool
    noise: NoiseWindow | None
    is_foreign: bool = False
    scored: int = 0
    tree: ComputedTree | None = None
    _history: TokenHistory | None = None
    _history_length: int = 0

    @classmethod
    def open(cls, spec: RequestSpec) -> Held:
        """A request of which nothing was heard yet."""
        params = spec.sampling
        stops = frozenset(params.stop_token_ids)
        return cls(
            spec=spec,
            tokens=[],
            stops=stops,
            is_plain=params.ranks_by_logits,
            noise=None if params.is_greedy else NoiseWindow(params.seed),
        )

    def roll_back(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        del self.tokens[length:]
        self.scored = min(self.scored, length)
        self._history = None

    def begin(self) -> None:
        """Get ready to describe rows of `tokens` from the first that is to be scored."""
        params, length = self.spec.sampling, len(self.tokens)
        if not params.needs_history:
            return
        # Describing a row costs its distance from the history: a sample of a long catch-up will do.
        self.scored = max(self.scored, length - SCORED_WITH_PENALTIES)
        first = min(max(self.scored, self.spec.prompt_len), length)
        if self._history is None or self._history_length > first:
            prompt_len = self.spec.prompt_len
            self._history = TokenHistory(self.tokens[:prompt_len], self.tokens[prompt_len:first])
            self._history_length = first

    def caught_up(self) -> None:
        """All of `tokens` has KV and was scored; rows described from here on follow the last of them."""
        self.scored = len(self.tokens)
        if self._history is not None:
            self._history.extend(self.tokens[self._history_length :])
            self._history_length = len(self.tokens)

    def ranking(self, position: int) -> Ranking | None:
        """How to rank the tokens after the committed one at `position`."""
        if self.is_plain:
            return None
        return self._ranking(position, self.tokens[self._history_length : position + 1])

    def tree_ranking(self, tree: ComputedTree, node: int) -> Ranking | None:
        """How to rank those after a node of `tree`, whose root is the last of `tokens`."""
        if self.is_plain:
            return None
        return self._ranking(len(self.tokens) - 1 + tree.depth[node], tree.path_tokens(node))

    def layer_ranking(self, depth: int) -> Ranking | None:
        """How to rank those after any node so many layers below the last of `tokens`.

        Only if `sampling.needs_history` is false: else that depends on the path to the node.
        """
        return None if self.is_plain else self._ranking(len(self.tokens) - 1 + depth, [])

    def _ranking(self, position: int, path: list[int]) -> Ranking:
        decided = position + 1 - self.spec.prompt_len
        noise = self.noise.get(decided) if self.noise is not None else None
        if self._history is None:
            return Ranking(Row(self.spec.sampling, decided), noise)
        return Ranking(Row(self.spec.sampling, decided, self._history, path), noise)

    def decisions(self, depth: int) -> range:
        """Output positions that a draft of `depth` layers decides, those to be scored before it included."""
        root = len(self.tokens) - self.spec.prompt_len
        first = max(self.scored - self.spec.prompt_len, 0)
        if (
            root - first > MOST_IN_WINDOW
        ):  # a long catch-up: its forwards are large enough to do it themselves
            first = root
        return range(first, root + max(depth, 1))


@dataclass(slots=True, eq=False)
class Job:
    """One item of the call while it is served.

    Attributes:
        request_id: the request.
        held: its state.
        beam: its candidate tree; the root alone until catching up is done.
        tree: what is computed, from the same root.
        slots: int32, reserved for the rows still to catch up on, later for those of the tree.
        done: committed tokens that have KV.
        opened: whether the KV cache opened the request in this call.
        num_scored, num_agreed: as in `Draft`.
        nodes: per node of `beam`, the one of `tree`.
    """

    request_id: str
    held: Held
    beam: Beam
    tree: ComputedTree
    slots: Int32 = field(default_factory=_no_slots)
    done: int = 0
    opened: bool = False
    num_scored: int = 0
    num_agreed: int = 0
    nodes: list[int] = field(default_factory=lambda: [ROOT])

    def missing(self) -> list[int]:
        """Nodes of `tree` that are to be computed before the next layer can be added."""
        return [
            self.nodes[node] for node in self.beam.frontier if not self.tree.is_computed(self.nodes[node])
        ]

    def extend(self) -> None:
        """Add the next layer of the candidate tree; nothing of its frontier is missing."""
        beam, tree = self.beam, self.tree
        frontier = [self.nodes[node] for node in beam.frontier]
        size = len(beam.token)
        beam.grow([tree.values[node] for node in frontier], [tree.choices[node] for node in frontier])
        for node in range(size, len(beam.token)):
            self.nodes.append(tree.add(self.nodes[beam.parent[node]], beam.token[node], beam.logp[node]))
