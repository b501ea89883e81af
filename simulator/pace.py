"""A machine that is slower for a while and then quicker: its pace, a random process in time.

Who shares a machine with others is not slowed forward by forward but in phases, of hundredths of a second to
many seconds. Forwards that vary each by itself average out over a request, so that all requests of a kind
take the same time per token; phases do not, and decide which of them meet an objective near the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, sqrt

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from simulator.noise import normal

Float64 = NDArray[np.float64]

# Phases of a fit: a scheduler's time slice, what another process does, what another machine's load does.
PHASES_S = (0.03, 0.3, 3.0)
# Deviations beyond so many standard deviations are cut to it: they met something else.
_WIDEST = 3.0
_DRAWN = 1024


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the process: an Ornstein-Uhlenbeck process of the logarithm.

    Attributes:
        std: standard deviation of the logarithm.
        seconds: after which the correlation has fallen to 1/e.
    """

    std: float
    seconds: float


class Pace:
    """How much longer than on average everything takes at a time.

    On average over forwards that follow one another it is 1. Over time it is more: while they are long, there
    are fewer of them.
    """

    def __init__(self, phases: Sequence[Phase], key: int) -> None:
        """A process that a key fixes, as long as it is asked at the same times."""
        self._phases = phases
        self._key = key
        self._centre = sum(phase.std**2 for phase in phases) / 2
        self._num_drawn = 0
        self._drawn: list[float] = []
        self._now_s = 0.0
        self._state = [phase.std * self._draw() for phase in phases]

    def at(self, now_s: float) -> float:
        """The factor at a time, which must not lie before the one asked last."""
        passed_s = now_s - self._now_s
        if passed_s > 0.0:
            self._now_s = now_s
            for number, phase in enumerate(self._phases):
                kept = exp(-passed_s / phase.seconds)
                fresh = phase.std * sqrt(1.0 - kept * kept) * self._draw()
                self._state[number] = kept * self._state[number] + fresh
        return exp(self._centre + sum(self._state))

    def _draw(self) -> float:
        if not self._drawn:
            self._drawn = normal(self._key, self._num_drawn, _DRAWN).tolist()[::-1]
            self._num_drawn += _DRAWN
        return self._drawn.pop()


def fit_pace(
    runs: Sequence[tuple[Float64, Float64]], seconds: Sequence[float] = PHASES_S
) -> tuple[list[Phase], float]:
    """Phases of such a process, and the deviation left that each forward has by itself.

    Args:
        runs: of each when its forwards began, in seconds, and the logarithm of what they took relative to
            what is expected of them.
        seconds: lengths of the phases.

    Returns:
        Phases that were found, and a standard deviation of the logarithm.
    """
    runs = [run for run in runs if len(run[0])]
    every = np.concatenate([logs for _, logs in runs]) if runs else np.zeros(1)
    centre = float(np.median(every))
    # Robust: the middle two thirds of a normal distribution lie within one standard deviation.
    low, high = np.quantile(every, [0.159, 0.841])
    most = _WIDEST * float(high - low) / 2
    held = [(times, np.clip(logs - centre, -most, most)) for times, logs in runs]
    if not held or most == 0.0:
        return [], 0.0
    cut = np.concatenate([logs for _, logs in held])
    mean, variance = float(cut.mean()), float(cut.var())
    products, apart_s, weights = [], [], []
    lag = 1
    while any(len(times) > lag for times, _ in held):
        longer = [(times, logs - mean) for times, logs in held if len(times) > lag]
        both = np.concatenate([logs[lag:] * logs[:-lag] for _, logs in longer])
        products.append(float(both.mean()))
        apart_s.append(float(np.median(np.concatenate([times[lag:] - times[:-lag] for times, _ in longer]))))
        weights.append(sqrt(len(both) / lag))
        lag *= 2
    if not products:
        return [], sqrt(variance)
    weight = np.array(weights)
    columns = np.exp(-np.array(apart_s)[:, None] / np.array(seconds)[None, :])
    found, _ = nnls(columns * weight[:, None], np.array(products) * weight)
    phases = [
        Phase(std=sqrt(part), seconds=length)
        for part, length in zip(found.tolist(), seconds, strict=True)
        if part > 0.0
    ]
    return phases, sqrt(max(0.0, variance - float(found.sum())))
