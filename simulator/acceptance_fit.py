"""Fits an acceptance model and drafters' qualities to a log of what drafters said along answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit, ndtri

from benchmarks.acceptance_table import AcceptanceTable
from simulator.acceptance import AcceptanceModel, DraftQuality, choices

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

DEPTHS = 6
# Bins of draft probability in which calibration is judged.
BINS = 10
# Fewer positions than this say little of a request's own rate.
LEAST_POSITIONS = 16
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(31)


class FittedDrafters(msgspec.Struct, frozen=True, kw_only=True):
    """What a log says of a family of drafters.

    Attributes:
        model: how requests and positions differ.
        drafters: how good each is, by class of request.
    """

    model: AcceptanceModel
    drafters: dict[str, DraftQuality]


class Runs(msgspec.Struct, frozen=True, eq=False):
    """One drafter along the answers of one class.

    Attributes:
        first: by answer, float64 [positions], the probability it reports for its first choice.
        rank: by answer, int [positions], which choice is right.
    """

    first: list[Float64]
    rank: list[Int64]

    @property
    def right(self) -> list[Float64]:
        """By answer, 1 where the first choice is right."""
        return [(rank == 0).astype(np.float64) for rank in self.rank]

    @property
    def rate(self) -> float:
        """Mean over positions."""
        return float(np.concatenate(self.right).mean())


def runs_of(table: AcceptanceTable, drafter: int, domain: str) -> Runs:
    """The rows of one drafter and class."""
    rows = [part for part in table.answers(drafter, domain) if len(part) >= LEAST_POSITIONS]
    return Runs(
        first=[np.exp(table.logp[part, 0].astype(np.float64)) for part in rows],
        rank=[table.rank[part].astype(np.int64) for part in rows],
    )


def fit(table: AcceptanceTable) -> FittedDrafters:
    """Fit by moments; `shared_outcome` keeps its default.

    Raises:
        ValueError: if a class of answers has none that is long enough.
    """
    domains = sorted(set(table.domains))
    runs = {
        (index, domain): runs_of(table, index, domain)
        for index in range(len(table.drafters))
        for domain in domains
    }
    for (index, domain), held in runs.items():
        if len(held.rank) < 2:
            raise ValueError(
                f"the log has {len(held.rank)} answers of class {domain!r} with {LEAST_POSITIONS} tokens or "
                f"more read by {table.drafters[index]}: record more prompts"
            )
    spread, common = _spreads(runs, len(table.drafters), domains)
    lines = [_calibration([runs[index, d] for d in domains]) for index in range(len(table.drafters))]
    model = AcceptanceModel(
        request_spread=round(math.sqrt(common), 3),
        own_spread=round(math.sqrt(max(spread - common, 0.0)), 3),
        concentration=round(_concentration(runs, lines, math.sqrt(spread)), 3),
        second_share=round(_second_share(table, lines), 3),
        persistence=0.0,
        shared_confidence=round(_shared_confidence(runs, len(table.drafters), domains), 3),
    )
    qualities = {
        name: DraftQuality(
            rate={d: round(_median_rate(runs[index, d].rate, math.sqrt(spread)), 4) for d in domains},
            sharpness=round(1.0 / lines[index][0], 3),
            offset=round(-lines[index][1] / lines[index][0], 3),
        )
        for index, name in enumerate(table.drafters)
    }
    model = msgspec.structs.replace(model, persistence=round(_persistence(runs, table, model, qualities), 3))
    return FittedDrafters(model=model, drafters=qualities)


def checks(fitted: FittedDrafters, table: AcceptanceTable) -> dict[str, Any]:
    """Measured against modelled, on answers that should be others than those fitted to.

    Returns:
        by drafter and class: rate, chance of at least 1, 2, ... accepted tokens, correlation of neighbouring
        positions, and the mean difference between draft probability and its frequency, as pairs.
    """
    found: dict[str, Any] = {}
    for index, name in enumerate(table.drafters):
        for domain in sorted(set(table.domains)):
            real = runs_of(table, index, domain)
            if not real.rank:
                continue
            model = modelled(fitted, name, index, domain, [len(rank) for rank in real.rank])
            found.setdefault(name, {})[domain] = {
                "answers": len(real.rank),
                "positions": sum(map(len, real.rank)),
                **{
                    label: {"measured": figure(real), "model": figure(model)}
                    for label, figure in _FIGURES.items()
                },
            }
    return found


def fit_and_check(table: AcceptanceTable) -> dict[str, Any]:
    """Fit to every other answer of each class, check on the rest."""
    fitted = fit(table.of_answers(0, 2))
    return {**msgspec.to_builtins(fitted), "checks": checks(fitted, table.of_answers(1, 2))}


def modelled(
    fitted: FittedDrafters, drafter: str, index: int, domain: str, lengths: Sequence[int], repeats: int = 4
) -> Runs:
    """What the model says along answers of these lengths, `repeats` requests for each."""
    first, rank = [], []
    for seed, length in enumerate([length for length in lengths for _ in range(repeats)]):
        said = choices(
            fitted.model,
            fitted.drafters[drafter],
            domain,
            seed,
            index,
            num_positions=length,
            num_astray=0,
            width=4,
        )
        first.append(np.exp(said.logp[:, 0]))
        rank.append(said.rank)
    return Runs(first=first, rank=rank)


def survival(runs: Runs) -> list[float]:
    """Chance of at least 1, 2, ... `DEPTHS` first choices in a row being right, from any position on."""
    counts = np.zeros(DEPTHS)
    total = 0
    for right in runs.right:
        run, lengths = 0, np.zeros(len(right), dtype=np.int64)
        for place in range(len(right) - 1, -1, -1):
            run = run + 1 if right[place] else 0
            lengths[place] = run
        # Near its end an answer has no room for long runs.
        whole = lengths[: max(0, len(lengths) - DEPTHS + 1)]
        counts += [(whole >= depth).sum() for depth in range(1, DEPTHS + 1)]
        total += len(whole)
    return [round(float(count), 4) for count in counts / max(1, total)]


def lag_correlation(runs: Runs) -> float:
    """Mean correlation, within answers, of whether neighbouring first choices are right."""
    found = []
    for right in runs.right:
        if len(right) > 2 and 0.0 < right[1:].mean() < 1.0 and 0.0 < right[:-1].mean() < 1.0:
            found.append(np.corrcoef(right[1:], right[:-1])[0, 1])
    return round(float(np.mean(found)), 4) if found else 0.0


def calibration_error(runs: Runs) -> float:
    """Mean over positions of |reported probability - how often it is right|, in `BINS` equal bins."""
    first, right = np.concatenate(runs.first), np.concatenate(runs.right)
    place = np.minimum((first * BINS).astype(np.int64), BINS - 1)
    count = np.bincount(place, minlength=BINS)
    gap = np.abs(np.bincount(place, first, BINS) - np.bincount(place, right, BINS))
    return round(float(gap.sum() / max(1, count.sum())), 4)


def _rate(runs: Runs) -> float:
    return round(runs.rate, 4)


_FIGURES: dict[str, Callable[[Runs], Any]] = {
    "rate": _rate,
    "survival": survival,
    "lag correlation": lag_correlation,
    "calibration error": calibration_error,
}


def _spreads(
    runs: dict[tuple[int, str], Runs], num_drafters: int, domains: Sequence[str]
) -> tuple[float, float]:
    """Variance of a request's rate in logits, and what of it drafters have in common; noise removed."""
    own, shared = [], []
    for domain in domains:
        for index in range(num_drafters):
            held = runs[index, domain]
            own.append(_covariance(held, held))
        for one, other in combinations(range(num_drafters), 2):
            shared.append(_covariance(runs[one, domain], runs[other, domain]))
    total = max(0.0, float(np.mean(own)))
    return total, min(total, max(0.0, float(np.mean(shared)))) if shared else 0.75 * total


def _covariance(one: Runs, other: Runs) -> float:
    """Of two drafters' rates over the same requests, in logits, less what chance within requests makes."""
    a, b = one.right, other.right
    means = np.array([[x.mean(), y.mean()] for x, y in zip(a, b, strict=True)])
    noise = np.mean([_long_run(x - x.mean(), y - y.mean()) / len(x) for x, y in zip(a, b, strict=True)])
    scale = one.rate * (1.0 - one.rate) * other.rate * (1.0 - other.rate)
    return float((np.cov(means.T)[0, 1] - noise) / scale)


def _long_run(x: Float64, y: Float64, lags: int = 3) -> float:
    """Covariance of two centred series, neighbouring positions included, as a mean's variance has it."""
    total = float((x * y).mean())
    for lag in range(1, min(lags, len(x) - 1) + 1):
        total += float((x[lag:] * y[:-lag]).mean() + (x[:-lag] * y[lag:]).mean())
    return total


def _calibration(held: Sequence[Runs]) -> tuple[float, float]:
    """Platt scaling: slope and intercept of the logit of being right over that of what is reported."""
    logits = np.concatenate([_logit(p) for runs in held for p in runs.first])
    right = np.concatenate([r for runs in held for r in runs.right])

    def loss(line: Float64) -> float:
        score = line[0] * logits + line[1]
        return float(np.mean(np.logaddexp(0.0, score) - right * score))

    found = minimize(loss, np.array([1.0, 0.0]), method="L-BFGS-B", bounds=((0.2, 5.0), (-5.0, 5.0)))
    return float(found.x[0]), float(found.x[1])


def _logit(chance: Float64) -> Float64:
    clipped = np.clip(chance, 1e-6, 1.0 - 1e-6)
    return np.log(clipped / (1.0 - clipped))


def _concentration(
    runs: dict[tuple[int, str], Runs], lines: Sequence[tuple[float, float]], spread: float
) -> float:
    """Of the beta distribution of chances within a request: E[p(1-p)] is c / (c + 1) of m(1-m)."""
    shares = []
    for (index, _), held in runs.items():
        slope, intercept = lines[index]
        chance = expit(slope * _logit(np.concatenate(held.first)) + intercept)
        mean = held.rate
        within = mean * (1.0 - mean) - (spread * mean * (1.0 - mean)) ** 2
        shares.append(float((chance * (1.0 - chance)).mean()) / max(within, 1e-6))
    share = min(0.95, max(0.05, float(np.mean(shares))))
    return share / (1.0 - share)


def _second_share(table: AcceptanceTable, lines: Sequence[tuple[float, float]]) -> float:
    """The share of what the first choice leaves that makes the second right as often as it was.

    No choice is likelier than the one before, so the second has `min(p, share * (1 - p))`.
    """
    slope, intercept = np.array(lines).T
    chance = expit(slope[table.drafter] * _logit(np.exp(table.logp[:, 0])) + intercept[table.drafter])
    wanted = float((table.rank == 1).mean())
    low, high = 0.0, 1.0
    for _ in range(30):
        share = 0.5 * (low + high)
        if float(np.minimum(chance, share * (1.0 - chance)).mean()) < wanted:
            low = share
        else:
            high = share
    return 0.5 * (low + high)


def _shared_confidence(runs: dict[tuple[int, str], Runs], num_drafters: int, domains: Sequence[str]) -> float:
    """Mean correlation between drafters of how sure they are at the same position, as normal scores."""
    found = []
    for domain in domains:
        scores = [_normal_scores(np.concatenate(runs[i, domain].first)) for i in range(num_drafters)]
        found += [float(np.corrcoef(one, other)[0, 1]) for one, other in combinations(scores, 2)]
    return min(0.99, max(0.0, float(np.mean(found)))) if found else AcceptanceModel().shared_confidence


def _normal_scores(values: Float64) -> Float64:
    ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable")
    scores: Float64 = ndtri((ranks + 0.5) / len(values))
    return scores


def _median_rate(mean: float, spread: float) -> float:
    """The rate of a request of median ease where requests that differ by `spread` logits have this mean."""
    low, high = 1e-4, 1.0 - 1e-4
    for _ in range(40):
        middle = 0.5 * (low + high)
        logits = math.log(middle / (1.0 - middle)) + spread * _NODES
        if float((_WEIGHTS / (1.0 + np.exp(-logits))).sum() / _WEIGHTS.sum()) < mean:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def _persistence(
    runs: dict[tuple[int, str], Runs],
    table: AcceptanceTable,
    model: AcceptanceModel,
    qualities: dict[str, DraftQuality],
) -> float:
    """The correlation of neighbouring latents that makes neighbouring positions agree as measured."""
    wanted = float(np.mean([lag_correlation(held) for held in runs.values()]))

    def got(persistence: float) -> float:
        trial = FittedDrafters(
            model=msgspec.structs.replace(model, persistence=persistence), drafters=qualities
        )
        return float(
            np.mean(
                [
                    lag_correlation(
                        modelled(trial, table.drafters[index], index, domain, [len(r) for r in held.rank], 2)
                    )
                    for (index, domain), held in runs.items()
                ]
            )
        )

    # Nearly proportional: two trials give the slope.
    none, half = got(0.0), got(0.5)
    return min(0.95, max(0.0, 0.5 * (wanted - none) / (half - none))) if half > none else 0.0
