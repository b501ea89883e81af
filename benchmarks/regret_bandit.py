"""SPIN's bandit: requests that last for ever, drafters with capacities, and a best one for each request.

A slot is one verify step. The target accepts each drafted token with the pair's rate, so accepted tokens are
geometric up to the depth, which is the best one for the pair whatever selects it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from selector.assignment import match
from selector.goodput import best_goodput

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

VERIFY_S = 0.025
TOKEN_S = 0.0004
MAX_DEPTH = 8
# Of each drafter: seconds of a layer, and the mean of its rates over requests.
LAYER_S = (0.001, 0.002, 0.0035, 0.006)
MEAN_RATES = (0.58, 0.66, 0.74, 0.82)
RATE_SPREAD = 0.13
CAPACITY = 3
NUM_REQUESTS = 8
# Reading a token takes so much of a layer's time, and nobody reads more than the window: it slides.
READ_SHARE = 1 / 64
WINDOW_TOKENS = 2048
# The best matching is ahead of the second best by this share of a request's goodput. Where it is not, more
# slots than are simulated pass before any bandit can tell them apart.
LEAST_GAP = 0.03


class BanditCosts:
    """Seconds, the same at every length."""

    def verify_s(self, num_context: int) -> float:
        """See `StepCosts`."""
        return VERIFY_S

    def token_s(self, num_context: int) -> float:
        """See `StepCosts`."""
        return TOKEN_S

    def layer_s(self, kind: str, num_context: int) -> float:
        """See `StepCosts`."""
        return LAYER_S[int(kind[1:])]

    def rebuild_s(self, kind: str, num_tokens: int) -> float:
        """See `StepCosts`."""
        return min(num_tokens, WINDOW_TOKENS) * READ_SHARE * LAYER_S[int(kind[1:])]


@dataclass(frozen=True)
class Bandit:
    """One instance.

    Attributes:
        rates: float64 [requests, drafters].
        num_prompt: tokens of each request's prompt.
    """

    rates: Float64
    num_prompt: tuple[int, ...]

    @cached_property
    def capacities(self) -> Int64:
        """int64 [drafters]."""
        return np.full(self.rates.shape[1], CAPACITY, dtype=np.int64)

    @cached_property
    def goodput(self) -> Float64:
        """float64 [requests, drafters], tokens per second."""
        return np.array(
            [[best_goodput(rate, LAYER_S[j], VERIFY_S, TOKEN_S, MAX_DEPTH) for j, rate in enumerate(row)]
             for row in self.rates]
        )  # fmt: skip

    @cached_property
    def depth(self) -> Int64:
        """int64 [requests, drafters], the depth that brings it."""
        found = np.zeros(self.rates.shape, dtype=np.int64)
        for (i, j), rate in np.ndenumerate(self.rates):
            depths = range(MAX_DEPTH + 1)
            values = [best_goodput(rate, LAYER_S[j], VERIFY_S, TOKEN_S, depth) for depth in depths]
            found[i, j] = int(np.argmax(values))
        return found

    @cached_property
    def step_s(self) -> Float64:
        """float64 [requests, drafters], seconds of a slot of the pair."""
        return VERIFY_S + self.depth * (np.array(LAYER_S) + TOKEN_S)

    @property
    def none(self) -> float:
        """Tokens per second without a drafter."""
        return 1.0 / VERIFY_S

    @cached_property
    def optimum(self) -> float:
        """Tokens per second of all requests on the best matching."""
        return match(self.goodput, self.capacities, self.none).value

    @cached_property
    def slot_s(self) -> float:
        """Seconds a slot is taken to last: the mean over requests on the best matching."""
        columns = match(self.goodput, self.capacities, self.none).columns
        rows = np.flatnonzero(columns >= 0)
        return float(self.step_s[rows, columns[rows]].mean())

    def gap(self) -> float:
        """Lead of the best matching over the second best, in shares of a request's mean goodput."""
        columns = match(self.goodput, self.capacities, self.none).columns
        second = -np.inf
        for i, j in enumerate(columns):
            if j >= 0:
                without = self.goodput.copy()
                without[i, j] = -np.inf
                second = max(second, match(without, self.capacities, self.none).value)
        return (self.optimum - second) / (self.optimum / len(columns))

    def accepted(self, uniform: Float64) -> Int64:
        """Accepted draft tokens (int64 [slots, requests, drafters]) for uniform noise of that shape."""
        with np.errstate(divide="ignore"):
            lengths = np.log(uniform) / np.log(self.rates)
        return np.minimum(lengths, self.depth).astype(np.int64)


def draw(rng: np.random.Generator) -> Bandit:
    """A random instance: larger drafters agree more, but which one is best differs between requests."""
    num_prompt = tuple(rng.integers(20, 400, NUM_REQUESTS).tolist())
    while True:
        noise = rng.normal(0.0, RATE_SPREAD, (NUM_REQUESTS, len(LAYER_S)))
        bandit = Bandit(np.clip(np.array(MEAN_RATES) + noise, 0.1, 0.95), num_prompt)
        if bandit.gap() >= LEAST_GAP:
            return bandit


def shifted(bandit: Bandit, rng: np.random.Generator) -> Bandit:
    """The same requests when the two drafters that served most change places in quality."""
    columns = match(bandit.goodput, bandit.capacities, bandit.none).columns
    counts = np.bincount(columns[columns >= 0], minlength=bandit.rates.shape[1])
    first, second = np.argsort(-counts, kind="stable")[:2]
    while True:
        rates = bandit.rates.copy()
        rates[:, first] = np.clip(bandit.rates[:, first] - 0.3 + rng.normal(0, 0.05, len(rates)), 0.1, 0.95)
        rates[:, second] = np.clip(bandit.rates[:, second] + 0.1 + rng.normal(0, 0.05, len(rates)), 0.1, 0.95)
        after = Bandit(rates, bandit.num_prompt)
        if after.gap() >= LEAST_GAP:
            return after
