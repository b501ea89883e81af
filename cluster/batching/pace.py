"""How iterations have gone lately: what batching rules predict the next one from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.requests import Request
from cluster.running_mean import RunningMean
from engine.tree import TokenTree
from verifier.messages import VerifyResult

# What a call counts for is multiplied by this with every later one: prompts come in bursts.
REMEMBERED = 0.99
# A profile may say that an iteration takes nothing beside its forward; tenfold of nothing would stay nothing.
LEAST_BESIDE_S = 1e-4


@dataclass(slots=True)
class Pace:
    """Running means over verify calls.

    Attributes:
        beside_s: seconds of an iteration outside the target's forward.
        num_rows: tokens in a call per decoding request.
        num_committed: tokens committed per decoding request.
        prefilled: prompt tokens computed, old ones counting less and less.
        decoded: decodes, a request and call each, likewise.
    """

    beside_s: RunningMean
    num_rows: RunningMean = field(default_factory=lambda: RunningMean(1.0))
    num_committed: RunningMean = field(default_factory=lambda: RunningMean(1.0))
    prefilled: float = 0.0
    decoded: float = 0.0

    def verified(
        self, result: VerifyResult, trees: Mapping[str, TokenTree], requests: Mapping[str, Request]
    ) -> None:
        """Take the answer to a call in.

        Args:
            result: the answer.
            trees: draft trees of the call, by request id.
            requests: the requests, as they were before the answer.
        """
        num_prefilled = 0
        for progress in result.prefills:
            request = requests.get(progress.request_id)
            if request is not None:
                num_prefilled += progress.num_computed - progress.num_cached - request.num_computed
        self.prefilled = REMEMBERED * self.prefilled + max(0, num_prefilled)
        self.decoded = REMEMBERED * self.decoded + len(trees)
        if not result.verdicts or not trees:
            return
        self.num_rows.follow(sum([len(tree.token) for tree in trees.values()]) / len(trees))
        num_committed = sum([len(verdict.tokens) for verdict in result.verdicts])
        self.num_committed.follow(num_committed / len(result.verdicts))

    @property
    def num_prefilled(self) -> float:
        """Prompt tokens computed per decode."""
        return self.prefilled / max(1.0, self.decoded)

    def iterated(self, beside_s: float) -> None:
        """An iteration took so long besides its forward; a hiccup of the machine counts tenfold at most."""
        most_s = 10 * max(LEAST_BESIDE_S, self.beside_s.value)
        self.beside_s.follow(min(max(0.0, beside_s), most_s))
