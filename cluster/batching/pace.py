"""How iterations have gone lately: what batching rules predict the next one from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.planning import RunningMean
from engine.tree import TokenTree
from verifier.messages import Verdict


@dataclass(slots=True)
class Pace:
    """Running means over verify calls with draft trees in them.

    Attributes:
        beside_s: seconds of an iteration outside the target's forward.
        num_rows: tokens in the call per decoding request.
        num_committed: tokens committed per decoding request.
    """

    beside_s: RunningMean
    num_rows: RunningMean = field(default_factory=lambda: RunningMean(1.0))
    num_committed: RunningMean = field(default_factory=lambda: RunningMean(1.0))

    def verified(self, verdicts: Sequence[Verdict], trees: Mapping[str, TokenTree]) -> None:
        """Take the answer to a call in."""
        if not verdicts or not trees:
            return
        self.num_rows.follow(sum(map(len, trees.values())) / len(trees))
        self.num_committed.follow(sum(len(verdict.tokens) for verdict in verdicts) / len(verdicts))

    def iterated(self, beside_s: float) -> None:
        """An iteration took so long besides its forward; a hiccup of the machine counts tenfold at most."""
        self.beside_s.follow(min(max(0.0, beside_s), 10 * self.beside_s.value))
