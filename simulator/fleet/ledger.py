"""What came of a fleet's requests: counts over time and latencies as histograms, whatever their number."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cluster.stream_messages import Objective

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Latencies in milliseconds from 0.1 on, in steps of 1 %.
_LEAST_MS, _STEP, _NUM_BINS = 0.1, 1.01, 1900
ALL = "all"


class ClassResult(msgspec.Struct, frozen=True, kw_only=True):
    """One class, or all.

    Attributes:
        num_requests: that arrived.
        attainment: share that met their objectives.
        num_refused, num_unfinished: that got no answer, and none before the end.
        tokens_per_s: of answers that were completed, those after the last arrival among them, by the seconds
            of arrivals: more than cells can do where they fall behind.
        ttft_ms, tpot_ms: mean, median and 99th percentile, to 1 %.
    """

    num_requests: int
    attainment: float
    num_refused: int
    num_unfinished: int
    tokens_per_s: float
    ttft_ms: tuple[float, float, float]
    tpot_ms: tuple[float, float, float]


class Ledger:
    """Takes requests in as they arrive and end.

    Args:
        kinds: names of the classes.
        objectives: by class.
        seconds: of arrivals.
        bin_s: length of the parts of time that are told apart, by arrival.
    """

    def __init__(
        self, kinds: Sequence[str], objectives: Sequence[Objective], seconds: float, bin_s: float
    ) -> None:
        self._kinds, self._seconds, self.bin_s = kinds, seconds, bin_s
        self.num_bins = max(1, int(np.ceil(seconds / bin_s)))
        infinite = float("inf")
        self._ttft_ms = np.array([one.ttft_ms or infinite for one in objectives])
        self._tpot_ms = np.array([one.tpot_ms or infinite for one in objectives])
        shape = self.num_bins, len(kinds)
        self.arrived, self.attained, self.refused, self.ended = (np.zeros(shape, np.int64) for _ in range(4))
        self._tokens = np.zeros(len(kinds))
        self._histograms = np.zeros((2, len(kinds), _NUM_BINS), np.int64)
        self._sums = np.zeros((2, len(kinds)))

    def came(self, kinds: Ints, arrived: Floats) -> None:
        """Requests arrived."""
        np.add.at(self.arrived, (self._bin(arrived), kinds), 1)

    def was_refused(self, kinds: Ints, arrived: Floats) -> None:
        """Requests were refused for good."""
        np.add.at(self.refused, (self._bin(arrived), kinds), 1)

    def went(self, kinds: Ints, arrived: Floats, first_at: Floats, ended_at: Floats, output: Ints) -> None:
        """Requests got their last token.

        Args:
            kinds: classes.
            arrived, first_at, ended_at: when each came, got its first token and its last; seconds.
            output: tokens.
        """
        ttft_ms = 1e3 * (first_at - arrived)
        tpot_ms = 1e3 * (ended_at - first_at) / np.maximum(1, output - 1)
        met = (ttft_ms <= self._ttft_ms[kinds]) & ((tpot_ms <= self._tpot_ms[kinds]) | (output < 2))
        when = self._bin(arrived)
        np.add.at(self.ended, (when, kinds), 1)
        np.add.at(self.attained, (when[met], kinds[met]), 1)
        self._tokens += np.bincount(kinds, weights=output, minlength=len(self._kinds))
        for index, (values, held) in enumerate(((ttft_ms, output > 0), (tpot_ms, output > 1))):
            place = np.log(np.maximum(values[held], _LEAST_MS) / _LEAST_MS) / np.log(_STEP)
            place = np.minimum(place.astype(np.int64), _NUM_BINS - 1)
            np.add.at(self._histograms[index], (kinds[held], place), 1)
            self._sums[index] += np.bincount(kinds[held], weights=values[held], minlength=len(self._kinds))

    def results(self) -> dict[str, ClassResult]:
        """By class, and under `all`."""
        results = {ALL: self._result(np.arange(len(self._kinds)))}
        for index, name in enumerate(self._kinds):
            results[name] = self._result(np.array([index]))
        return results

    def _result(self, kinds: Ints) -> ClassResult:
        arrived, ended = int(self.arrived[:, kinds].sum()), int(self.ended[:, kinds].sum())
        refused = int(self.refused[:, kinds].sum())
        return ClassResult(
            num_requests=arrived,
            attainment=int(self.attained[:, kinds].sum()) / max(1, arrived),
            num_refused=refused,
            num_unfinished=arrived - ended - refused,
            tokens_per_s=float(self._tokens[kinds].sum()) / self._seconds,
            ttft_ms=self._latency(0, kinds),
            tpot_ms=self._latency(1, kinds),
        )

    def _latency(self, which: int, kinds: Ints) -> tuple[float, float, float]:
        histogram = self._histograms[which, kinds].sum(axis=0)
        count = int(histogram.sum())
        if count == 0:
            return 0.0, 0.0, 0.0
        below = np.cumsum(histogram)
        places = [int(np.searchsorted(below, share * count)) for share in (0.5, 0.99)]
        p50, p99 = (_LEAST_MS * _STEP ** (place + 0.5) for place in places)
        return float(self._sums[which, kinds].sum()) / count, p50, p99

    def _bin(self, arrived: Floats) -> Ints:
        return np.minimum((arrived / self.bin_s).astype(np.int64), self.num_bins - 1)
