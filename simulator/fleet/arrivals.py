"""Requests of a fleet as arrays, interval by interval; the same for every way to serve them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from benchmarks.arrivals import trace_times
from benchmarks.objectives import Slo
from cluster.stream_messages import Objective
from simulator.fleet.scenario import ArrivalConfig
from simulator.noise import key_of
from simulator.workloads import MIX, SimRequest

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_RATES, _REQUESTS, _UNREST = 21, 22, 23


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests, one per place of each array.

    Attributes:
        number: distinct in the run.
        kind: index of its class.
        rank: how slowly it is decoded among requests of its class, 0 to 1; a property of its text.
        arrived: when it came, in seconds.
        prompt, output: tokens, those of all its answer.
        done: tokens it has got, before it was moved from another cell.
        first_at: when the first of them came; NaN before.
        front_end: which one it came to.
        tries: how many cells have refused it for a full queue.
    """

    number: Ints
    kind: Ints
    rank: Floats
    arrived: Floats
    prompt: Ints
    output: Ints
    done: Ints
    first_at: Floats
    front_end: Ints
    tries: Ints

    def __len__(self) -> int:
        return len(self.number)

    def take(self, which: NDArray[np.int64] | NDArray[np.bool_]) -> Requests:
        """Some of them."""
        return Requests(*(getattr(self, part.name)[which] for part in fields(self)))

    def again(self) -> Requests:
        """The same, refused once more."""
        return replace(self, tries=self.tries + 1)

    @classmethod
    def join(cls, *some: Requests) -> Requests:
        """All of them, in that order."""
        return cls(*(np.concatenate([getattr(one, part.name) for one in some]) for part in fields(cls)))

    @classmethod
    def none(cls) -> Requests:
        """No request."""
        ints, floats = np.empty(0, np.int64), np.empty(0)
        return cls(ints, ints, floats, floats, ints, ints, ints, floats, ints, ints)


@dataclass(frozen=True)
class Arrivals:
    """Makes the requests of a scenario; the same interval always gives the same ones.

    Attributes:
        config: how many, and of what classes.
        baseline_s: seconds per token that relative objectives are multiples of.
        num_front_ends: that they come to, evenly.
        seed: of all.
    """

    config: ArrivalConfig
    baseline_s: float
    num_front_ends: int
    seed: int

    def __post_init__(self) -> None:
        unknown = set(self.shares) | set(self.config.ttft_ms)
        if unknown - MIX.keys():
            raise ValueError(f"no class {sorted(unknown - MIX.keys())} in the built-in mix: {', '.join(MIX)}")
        if min(self.shares.values()) < 0.0 or sum(self.shares.values()) <= 0.0:
            raise ValueError("arrivals.mix: shares are 0 or more, and one is above 0")

    @cached_property
    def shares(self) -> Mapping[str, float]:
        """Of the classes."""
        return self.config.mix or {name: kind.share for name, kind in MIX.items()}

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Names of the classes, in order of their index."""
        return tuple(self.shares)

    @cached_property
    def objectives(self) -> tuple[Objective, ...]:
        """By class."""
        baseline = Slo(tpot_ms=1e3 * self.baseline_s)
        return tuple(
            Objective(tpot_ms=MIX[name].slo.resolve(baseline).tpot_ms, ttft_ms=self.config.ttft_ms.get(name))
            for name in self.kinds
        )

    @cached_property
    def _trace(self) -> Floats | None:
        """The trace's arrivals per bin over their mean."""
        if self.config.trace is None:
            return None
        times = np.asarray(trace_times(self.config.trace))
        times = times - times.min()
        bins = max(1, int(times.max() // self.config.trace_bin_s))
        counts = np.histogram(times, bins=bins)[0].astype(float)
        relative: Floats = counts / counts.mean()
        return relative

    def rate(self, at_s: float) -> float:
        """Requests per second expected at a time."""
        config = self.config
        if self._trace is not None:
            place = min(int(at_s / config.seconds * len(self._trace)), len(self._trace) - 1)
            rate = config.rate * float(self._trace[place])
        else:
            turn = at_s / (config.period_s or config.seconds)
            rate = config.rate * (1.0 - config.swing * float(np.cos(2.0 * np.pi * turn)))
        for burst in config.bursts:
            if burst.start_s <= at_s < burst.start_s + burst.seconds:
                rate *= burst.factor
        if config.unrest:
            shape = config.unrest**-2.0
            rng = np.random.default_rng((self.seed, _UNREST, int(at_s)))
            rate *= float(rng.gamma(shape, 1.0 / shape))
        return rate

    def between(self, start_s: float, seconds: float, first_number: int) -> Requests:
        """The requests of an interval, by time of arrival."""
        rng = np.random.default_rng((self.seed, _REQUESTS, round(start_s * 1e3)))
        count = int(rng.poisson(self.rate(start_s) * seconds)) if start_s < self.config.seconds else 0
        return self._draw(np.sort(start_s + seconds * rng.random(count)), first_number, rng)

    def sample(self, count: int, seed: int) -> Requests:
        """Some requests of the mix, all at time 0."""
        return self._draw(np.zeros(count), 0, np.random.default_rng((self.seed, _REQUESTS, seed)))

    def _draw(self, times: Floats, first_number: int, rng: np.random.Generator) -> Requests:
        count = len(times)
        weights = np.array(list(self.shares.values()))
        kinds = np.searchsorted(np.cumsum(weights / weights.sum()), rng.random(count), side="right")
        kinds = np.minimum(kinds, len(weights) - 1).astype(np.int64)
        return Requests(
            number=np.arange(first_number, first_number + count),
            kind=kinds,
            rank=rng.random(count),
            arrived=times,
            prompt=_lengths([MIX[name].prompt for name in self.kinds], kinds, rng),
            output=_lengths([MIX[name].output for name in self.kinds], kinds, rng),
            done=np.zeros(count, np.int64),
            first_at=np.full(count, np.nan),
            front_end=rng.integers(0, self.num_front_ends, count),
            tries=np.zeros(count, np.int64),
        )

    def singly(self, requests: Requests, at_s: Floats) -> list[SimRequest]:
        """The same as requests for a simulated cell, to which they come at `at_s`.

        What one has got already counts as part of its prompt, which takes as long to read.
        """
        made = []
        for index, number in enumerate(requests.number.tolist()):
            kind, done = int(requests.kind[index]), int(requests.done[index])
            made.append(
                SimRequest(
                    request_id=f"r{number}",
                    kind=self.kinds[kind],
                    arrival_s=float(at_s[index]),
                    num_prompt=int(requests.prompt[index]) + done,
                    num_output=max(1, int(requests.output[index]) - done),
                    objective=self.objectives[kind],
                    seed=key_of(self.seed, number) >> 1,
                )
            )
        return made


def _lengths(shapes: list[tuple[float, float, int, int]], kinds: Ints, rng: np.random.Generator) -> Ints:
    median, sigma, least, most = np.array(shapes, dtype=float).T
    drawn = np.round(median[kinds] * np.exp(sigma[kinds] * rng.standard_normal(len(kinds))))
    lengths: Ints = np.clip(drawn, least[kinds], most[kinds]).astype(np.int64)
    return lengths
