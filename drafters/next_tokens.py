"""A drafter's best next tokens: one model forward, scores, top k, one transfer to the host.

Greedy requests rank tokens by the model's log-probability. Sampling requests rank them by *perturbed* score:
processed log-probability plus the Gumbel noise which the target adds at that output position (design, idea
2). The target picks the highest of its own perturbed scores, so the nearer a drafter comes to the target,
the surer its highest one is that token, however flat the distribution; and the chance that a given child is
picked is a function of its margin below the best. The log-softmax over the perturbed scores is such a
function, 0 for a clear leader, and it adds up along a path like a log-probability. It is not yet a
probability of acceptance: calibration maps it to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from engine.runner import ModelRunner, Segment
from engine.sampling import Row, perturbed_scores

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Values = list[list[float]]
Tokens = list[list[int]]


class NextTokens:
    """Runs the model and reports the best next tokens of the rows kept.

    Attributes:
        seconds: time spent in forwards since `reset`.
        num_forwards: forwards since `reset`.
    """

    def __init__(self, runner: ModelRunner) -> None:
        """Run `runner`."""
        self._runner = runner
        self.reset()

    def reset(self) -> None:
        """Zero the counters."""
        self.seconds = 0.0
        self.num_forwards = 0

    def best(
        self, segments: Sequence[Segment], keep: Int32, rows: Sequence[Row | None], k: int
    ) -> tuple[Values, Tokens]:
        """The `k` best next tokens after each row kept.

        Args:
            segments: rows to forward.
            keep: int32 [n], indices of the rows wanted, among all rows concatenated.
            rows: per row kept, what its scores depend on; None for plain log-probabilities.
            k: tokens per row; fewer if the vocabulary is smaller.

        Returns:
            per row kept, log-softmax of the best scores, descending, and the tokens.
        """
        started = perf_counter()
        logits = self._runner.forward(segments, keep)
        on_host = logits.device.type == "cpu"
        if on_host:
            self.seconds += perf_counter() - started
        self.num_forwards += 1
        logp = torch.log_softmax(_scores(logits, rows), dim=-1)
        if on_host:
            return _best_on_host(logp.numpy(), min(k, logp.shape[1]))
        best, token = torch.topk(logp, min(k, logp.shape[1]), dim=-1)
        # Token ids are exact in float64, and one transfer means one synchronisation.
        values, ids = torch.stack((best.double(), token.double())).cpu()
        self.seconds += perf_counter() - started
        return values.tolist(), ids.long().tolist()


def _best_on_host(logp: Float32, k: int) -> tuple[Values, Tokens]:
    """The `k` highest of each row of float32 [n, vocab], which is overwritten; ties to the lowest token.

    Numpy's argmax is a vectorised scan, 16 times as fast as a row of torch.topk at a vocabulary of 4096, and
    k is small.
    """
    n = len(logp)
    row = np.arange(n)
    values = np.empty((n, k), dtype=np.float32)
    tokens = np.empty((n, k), dtype=np.int64)
    for choice in range(k):
        token = logp.argmax(axis=1)
        tokens[:, choice] = token
        values[:, choice] = logp[row, token]
        logp[row, token] = -np.inf
    return values.tolist(), tokens.tolist()


def _scores(logits: torch.Tensor, rows: Sequence[Row | None]) -> torch.Tensor:
    """Perturbed scores where a row is described, the logits themselves elsewhere."""
    described = [row for row in rows if row is not None]
    if not described:
        return logits
    if len(described) == len(rows):
        return perturbed_scores(logits, described)
    which = torch.tensor([i for i, row in enumerate(rows) if row is not None], device=logits.device)
    return logits.index_copy(0, which, perturbed_scores(logits[which], described))
