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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.best_tokens import best_tokens, highest_log_probabilities
from engine.device_rows import DeviceRows, DeviceRowsRunner
from engine.devices import Transfer, to_device
from engine.noise import gumbel_noise
from engine.packed import Kind, arrays_in
from engine.runner import ModelRunner, Segment
from engine.sampling import Row, processed_logits
from engine.sampling_params import SamplingParams
from engine.triton_support import runs_triton

Int32 = NDArray[np.int32]
Values = list[list[float]]
Tokens = list[list[int]]


@dataclass(frozen=True, slots=True)
class Ranking:
    """How the tokens after one row are ranked, where that is not by the model's own logits.

    Attributes:
        row: what the target's decision there depends on.
        noise: float32 [vocab], the Gumbel noise of that decision if it is at hand.
    """

    row: Row
    noise: torch.Tensor | None = None


#: A row that is ranked by the model's own logits.
_BY_LOGITS = Row(SamplingParams(temperature=0.0), 0)


class OnDevice(NamedTuple):
    """Best next tokens of some rows, on the device: float32 [n, k], descending, and int64 [n, k]."""

    values: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True, slots=True)
class Sent:
    """Tensors of the device on their way to the host: `transfer` has their bytes, one after the other."""

    transfer: Transfer
    kinds: Sequence[Kind]


class NextTokens:
    """Runs the model and reports the best next tokens of the rows kept.

    Either at once, by `best`, or later: `launch` and `launch_rows` leave the answers on the device, `send`
    begins to bring them to the host, and `receive` waits for them, while the device goes on with what was
    launched since.

    Attributes:
        seconds: time spent in forwards since `reset`.
        num_forwards: forwards since `reset`.
        device: where the logits are, as far as known.
    """

    def __init__(self, runner: ModelRunner) -> None:
        """Run `runner`."""
        self._runner = runner
        self._rows_runner = runner if isinstance(runner, DeviceRowsRunner) else None
        self.device = torch.device("cpu") if self._rows_runner is None else self._rows_runner.device
        # When the first forward was launched, or the host last waited, while there is something to wait for.
        self._waiting_since: float | None = None
        self._num_sent = 0  # not received
        self.reset()

    @property
    def takes_rows(self) -> bool:
        """Whether `launch_rows` is possible."""
        return self._rows_runner is not None

    @property
    def takes_trees(self) -> bool:
        """Whether it is possible with several rows per request."""
        return self._rows_runner is not None and self._rows_runner.takes_trees

    def reset(self) -> None:
        """Zero the counters."""
        self.seconds = 0.0
        self.num_forwards = 0
        self._waiting_since, self._num_sent = None, 0  # nobody asks for what the last call left

    def best(
        self, segments: Sequence[Segment], keep: Int32, rankings: Sequence[Ranking | None], k: int
    ) -> tuple[Values, Tokens]:
        """The `k` best next tokens after each row kept.

        Args:
            segments: rows to forward.
            keep: int32 [n], indices of the rows wanted, among all rows concatenated.
            rankings: per row kept, how its tokens are ranked; None for plain log-probabilities.
            k: tokens per row; fewer if the vocabulary is smaller.

        Returns:
            per row kept, log-softmax of the best scores, descending, and the tokens.
        """
        started = perf_counter()
        logits = self._runner.forward(segments, keep)
        self.device = logits.device
        on_host = logits.device.type == "cpu"
        if on_host:
            self._waited(started)
        self.num_forwards += 1
        values, tokens = best_tokens(torch.log_softmax(_scores(logits, rankings), dim=-1), k)
        if not on_host:
            self._waited(started)  # kernels run behind: the transfer waits for them
        return values.tolist(), tokens.tolist()

    def launch(
        self, segments: Sequence[Segment], keep: Int32, rankings: Sequence[Ranking | None], k: int
    ) -> OnDevice:
        """As `best`, without waiting for the device."""
        self._begin()
        return _highest(self._runner.forward(segments, keep), rankings, k)

    def launch_rows(
        self, segments: Sequence[Segment], rows: DeviceRows, rankings: Sequence[Ranking | None], k: int
    ) -> OnDevice:
        """As `launch`, of all rows, whose tokens the device knows."""
        assert self._rows_runner is not None
        self._begin()
        return _highest(self._rows_runner.forward_rows(segments, rows), rankings, k)

    def replay(self, layer: Callable[[], None], memory: torch.Tensor, kinds: Sequence[Kind]) -> Sent:
        """Launch a captured forward, and begin to bring to the host what it leaves.

        Args:
            layer: launches it.
            memory: uint8, where its results lie.
            kinds: what they are, one after the other.
        """
        self._begin()
        layer()
        self._num_sent += 1
        return Sent(Transfer(memory), kinds)

    def send(self, tensors: Sequence[torch.Tensor]) -> Sent:
        """Begin to bring tensors of what was launched to the host, in one transfer."""
        self._num_sent += 1
        joined = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
        return Sent(Transfer(joined), [(tensor.shape, tensor.dtype) for tensor in tensors])

    def receive(self, sent: Sent) -> list[NDArray[Any]]:
        """Wait for tensors that were sent, but for nothing that was launched after them."""
        joined = sent.transfer.wait().numpy()
        self._num_sent -= 1
        if self._waiting_since is not None:
            self._waited(self._waiting_since)
            if not self._num_sent:
                self._waiting_since = None
        return arrays_in(joined, sent.kinds)

    def _waited(self, since: float) -> None:
        """Count the time since then, unless it is counted already."""
        now = perf_counter()
        if self._waiting_since is not None:
            since, self._waiting_since = self._waiting_since, now
        self.seconds += now - since

    def _begin(self) -> None:
        self.num_forwards += 1
        if self._waiting_since is None:
            self._waiting_since = perf_counter()


def _highest(logits: torch.Tensor, rankings: Sequence[Ranking | None], k: int) -> OnDevice:
    return OnDevice(*highest_log_probabilities(_scores(logits, rankings, may_wait=False), k))


def _scores(
    logits: torch.Tensor, rankings: Sequence[Ranking | None], *, may_wait: bool = True
) -> torch.Tensor:
    """Perturbed scores of the rows with a ranking, the logits themselves elsewhere."""
    described = [ranking for ranking in rankings if ranking is not None]
    if not described:
        return logits
    if runs_triton(logits.device):
        # Log-softmax makes a constant per row vanish; rows without a ranking are copied by the same launch.
        rows = [_BY_LOGITS if ranking is None else ranking.row for ranking in rankings]
        return processed_logits(logits, rows, perturbed=True)
    if len(described) == len(rankings):
        return _perturbed(logits, described, may_wait=may_wait)
    which = to_device(
        torch.tensor([i for i, ranking in enumerate(rankings) if ranking is not None]), logits.device
    )
    scores = _perturbed(logits.index_select(0, which), described, may_wait=may_wait)
    return logits.index_copy(0, which, scores)


def _perturbed(logits: torch.Tensor, rankings: Sequence[Ranking], *, may_wait: bool) -> torch.Tensor:
    """As `engine.sampling.perturbed_scores`, with the noise that is at hand."""
    rows = [ranking.row for ranking in rankings]
    scores = processed_logits(logits, rows, may_wait=may_wait).log_softmax(dim=-1)
    sampled = [i for i, ranking in enumerate(rankings) if not ranking.row.params.is_greedy]
    if not sampled:
        return scores
    noise = {i: rankings[i].noise for i in sampled}
    missing = [i for i, row in noise.items() if row is None]
    if missing:
        computed = gumbel_noise(
            [rows[i].params.seed for i in missing],
            [rows[i].position for i in missing],
            scores.shape[1],
            device=scores.device,
        )
        noise.update(zip(missing, computed, strict=True))
    added = torch.stack([row.to(scores.device) for row in noise.values() if row is not None])
    if len(sampled) == len(rankings):
        return scores.add_(added)
    return scores.index_add_(0, to_device(torch.tensor(sampled), scores.device), added)
