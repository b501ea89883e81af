"""What drafters propose and the target decides, generated so that draft probabilities mean what they say.

Every request has one text: the target's token at output position t is a function of the request's seed and of
t alone, whatever is drafted (drafter-invariant sampling, design, idea 2). A drafter that has the text up to t
gives its first choices the probabilities q1 >= q2 >= ...; the target's token then *is* the k-th of them with
probability q_k. So the product of conditional probabilities along a path is the chance that the path is
accepted, given all that the drafter said, and trees of any shape are consistent with each other: they are cut
from one infinite tree of contexts.

- q1 follows a beta distribution around the request's own rate on that drafter. Its logit is the drafter's on
  requests of that class, plus how easy the request is for all drafters, plus how it suits this one (as in
  `selector.acceptance`).
- Of what is left, each further choice has a fixed share, but no more than the one before it.
- Easy positions are easy for all drafters and come in runs (an autoregressive latent), and drafters tend to
  be right together: two Gaussian copulas, which leave each drafter's own probabilities as they are.
- Miscalibration reports `q ** sharpness`, renormalised: above 1 the drafter is surer than it should be. With
  an `offset` it shifts the logit of the first choice: a drafter taught the target's samples is far less sure
  than it is right when the target takes its likeliest token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter
from scipy.special import betaincinv, ndtr

from simulator.noise import key_of, normal, uniform

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

FITTED = Path(__file__).with_name("acceptance.json")
# And to the drafters of the demo family.
DEMO = Path(__file__).with_name("demo_acceptance.json")
# Least probability of a first choice: a drafter always has some.
LEAST_CONFIDENCE = 0.02
# Streams of noise of a request; those of a drafter are told apart by its index, counted from 0.
_EASE, _POSITION, _OUTCOME, _TEXT, _DRAFTER = 1, 2, 3, 4, 16
_GRID_RATE = np.linspace(0.02, 0.98, 49)
_GRID_UNIFORM = (np.arange(256) + 0.5) / 256


class AcceptanceModel(msgspec.Struct, frozen=True, kw_only=True):
    """How requests differ, and positions within them.

    Attributes:
        request_spread: standard deviation, in logits, of how easy requests of a class are for all drafters.
        own_spread: the same of how a request suits one drafter.
        concentration: of the beta distribution of the first choice's probability (the sum of its two
            parameters): small ones make drafters mostly sure or mostly unsure, infinity always equally sure.
        second_share: share of the remaining probability that each further choice takes.
        persistence: correlation of the latent ease of neighbouring positions.
        shared_confidence: share of that latent that drafters have in common.
        shared_outcome: correlation of drafters being right at the same position beyond that.
    """

    request_spread: float = 0.4
    own_spread: float = 0.15
    concentration: float = 1.0
    second_share: float = 0.4
    persistence: float = 0.25
    shared_confidence: float = 0.6
    shared_outcome: float = 0.5


class DraftQuality(msgspec.Struct, frozen=True, kw_only=True):
    """How good one drafter is.

    Attributes:
        rate: chance that its first choice is the target's token, in a request of median ease, by class of
            request; the key `*` is for classes not named.
        sharpness: power to which it reports its probabilities; 1 is calibrated.
        fixed: every position of every request has exactly the class's rate (SmartSpec's synthetic setting).
        offset: added to `sharpness` times the logit of its first choice's chance; below 0 it is less sure
            than it should be.
    """

    rate: dict[str, float]
    sharpness: float = 1.0
    fixed: bool = False
    offset: float = 0.0

    def rate_of(self, kind: str) -> float:
        """The rate on requests of a class.

        Raises:
            ValueError: if neither the class nor `*` is named, or the rate is not between 0 and 1.
        """
        rate = self.rate.get(kind, self.rate.get("*"))
        if rate is None:
            raise ValueError(f"no acceptance rate for class {kind!r}, and none for `*`: {sorted(self.rate)}")
        if not 0.0 < rate < 1.0:
            raise ValueError(f"the acceptance rate of class {kind!r} must be between 0 and 1, not {rate}")
        return rate


class Choices(msgspec.Struct, frozen=True, eq=False):
    """What a drafter would say in each of a run of contexts.

    Attributes:
        logp: float64 [contexts, width], log-probabilities it reports, descending.
        probability: float64 [contexts, width], the chance that each is the target's token.
        rank: int64 [contexts], which of them is the target's token; `width` if none. Only the first
            contexts, those along the text, have a target's token: it is `width` for the others.
    """

    logp: Float64
    probability: Float64
    rank: Int64


def request_rate(model: AcceptanceModel, quality: DraftQuality, kind: str, seed: int, drafter: int) -> float:
    """A request's own mean acceptance rate on one drafter.

    Args:
        model: how requests differ.
        quality: of the drafter.
        kind: class of the request.
        seed: of the request.
        drafter: the drafter's index.
    """
    rate = quality.rate_of(kind)
    if quality.fixed:
        return rate
    ease = float(normal(key_of(seed, _EASE), 0, 1)[0])
    own = float(normal(key_of(seed, _DRAFTER + 4 * drafter), 0, 1)[0])
    logit = math.log(rate / (1.0 - rate)) + model.request_spread * ease + model.own_spread * own
    return 1.0 / (1.0 + math.exp(-logit))


def choices(
    model: AcceptanceModel,
    quality: DraftQuality,
    kind: str,
    seed: int,
    drafter: int,
    *,
    num_positions: int,
    num_astray: int,
    width: int,
) -> Choices:
    """What a drafter says along a request's text and off it.

    Args:
        model, quality, kind, seed, drafter: as for `request_rate`.
        num_positions: output positions; context t has the text before position t.
        num_astray: contexts that hold a wrong token; they come after those.
        width: choices per context.
    """
    rate, total = request_rate(model, quality, kind, seed, drafter), num_positions + num_astray
    own = key_of(seed, _DRAFTER + 4 * drafter + 1)
    if quality.fixed:
        first = np.full(total, rate)
    else:
        shared = np.zeros(total)
        fresh = normal(key_of(seed, _POSITION), 0, num_positions)
        persistence = model.persistence
        shared[:num_positions] = _autoregressive(fresh, persistence)
        shared[num_positions:] = normal(own, total, num_astray)
        share = model.shared_confidence
        latent = math.sqrt(share) * shared + math.sqrt(1.0 - share) * normal(own, 0, total)
        first = _beta(rate, model.concentration, ndtr(latent))
    probability = np.empty((total, width))
    probability[:, 0] = first
    left = 1.0 - first
    for column in range(1, width):
        probability[:, column] = np.minimum(probability[:, column - 1], model.second_share * left)
        left = left - probability[:, column]
    rank = np.full(total, width, dtype=np.int64)
    drawn = _outcome(model, seed, drafter, num_positions)
    rank[:num_positions] = (drawn[:, None] > np.cumsum(probability[:num_positions], axis=1)).sum(axis=1)
    return Choices(np.log(_reported(probability, left, quality)), probability, rank)


def text(seed: int, count: int, vocab_size: int) -> Int64:
    """int64 [count]: the target's tokens from output position 0 on; even, so that odd ones are wrong.

    Args:
        seed: of the request.
        count: tokens.
        vocab_size: even.
    """
    draws = uniform(key_of(seed, _TEXT), 0, count)
    tokens: Int64 = 2 * (draws * (vocab_size // 2)).astype(np.int64)
    return tokens


def load_fitted(path: Path = FITTED) -> dict[str, AcceptanceModel]:
    """Fitted models by name; `scripts/fit_acceptance.py` writes the file, and `demo` is what DEMO holds."""
    held: Mapping[str, Mapping[str, object]] = json.loads(path.read_text())["models"]
    models = {name: msgspec.convert(fields, AcceptanceModel) for name, fields in held.items()}
    return models | {"demo": msgspec.convert(json.loads(DEMO.read_text())["model"], AcceptanceModel)}


def demo_drafters() -> dict[str, DraftQuality]:
    """How good the demo family's drafters are, by name."""
    held: Mapping[str, object] = json.loads(DEMO.read_text())["drafters"]
    return {name: msgspec.convert(fields, DraftQuality) for name, fields in held.items()}


def _autoregressive(fresh: Float64, persistence: float) -> Float64:
    """A stationary first-order process of unit variance driven by independent normals [n]."""
    if persistence == 0.0 or len(fresh) == 0:
        return fresh
    scaled = math.sqrt(1.0 - persistence**2) * fresh
    scaled[0] = fresh[0]
    filtered: Float64 = lfilter([1.0], [1.0, -persistence], scaled)
    return filtered


def _outcome(model: AcceptanceModel, seed: int, drafter: int, count: int) -> Float64:
    """float64 [count], uniform: where in the drafter's probabilities the target's token falls."""
    share = model.shared_outcome
    shared = normal(key_of(seed, _OUTCOME), 0, count)
    own = normal(key_of(seed, _DRAFTER + 4 * drafter + 2), 0, count)
    drawn: Float64 = ndtr(math.sqrt(share) * shared + math.sqrt(1.0 - share) * own)
    return drawn


def _reported(probability: Float64, left: Float64, quality: DraftQuality) -> Float64:
    """The probabilities a drafter of that quality would name; what is left counts as one more choice."""
    sharpness = quality.sharpness
    if quality.offset != 0.0:
        first = np.clip(probability[:, 0], 1e-6, 1.0 - 1e-6)
        odds = np.exp(sharpness * np.log(first / (1.0 - first)) + quality.offset)
        said = odds / (1.0 + odds)
        # The others share what it leaves as they do in truth, none above it.
        rest = probability[:, 1:] * ((1.0 - said) / (1.0 - first))[:, None]
        named: Float64 = np.column_stack([said, np.minimum(rest, said[:, None])])
        return np.maximum(named, 1e-9)
    if sharpness == 1.0:
        return np.maximum(probability, 1e-9)
    powers = np.maximum(probability, 1e-9) ** sharpness
    total = powers.sum(axis=1) + np.maximum(left, 0.0) ** sharpness
    reported: Float64 = powers / total[:, None]
    return reported


def _beta(mean: float, concentration: float, quantile: Float64) -> Float64:
    """Quantiles of a beta distribution of that mean and concentration, floored at `LEAST_CONFIDENCE`."""
    if math.isinf(concentration):
        return np.full(len(quantile), mean)
    table = _beta_table(concentration)
    place = min(max((mean - _GRID_RATE[0]) / (_GRID_RATE[1] - _GRID_RATE[0]), 0.0), len(_GRID_RATE) - 1.001)
    low = int(place)
    row = table[low] + (place - low) * (table[low + 1] - table[low])
    values: Float64 = np.interp(quantile, _GRID_UNIFORM, row)
    return values


@cache
def _beta_table(concentration: float) -> Float64:
    """float64 [rates, uniforms]: beta quantiles by mean; their own mean is exact but for the floor."""
    a, b = concentration * _GRID_RATE[:, None], concentration * (1.0 - _GRID_RATE[:, None])
    table: Float64 = np.clip(betaincinv(a, b, _GRID_UNIFORM[None, :]), LEAST_CONFIDENCE, 1.0 - 1e-6)
    return table
