"""Figures of a comparison with confidence intervals over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import bootstrap

CONFIDENCE = 0.95
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds with its bootstrap interval: None without data, no bounds with a single seed."""

    mean: float | None
    low: float | None = None
    high: float | None = None


def mean_of(values: Sequence[float | None]) -> Interval:
    """The mean over seeds, with a 95 % percentile bootstrap interval. Seeds without a value are left out.

    With three seeds the interval can only span what was measured; it says how far seeds agree, and little
    more.
    """
    held = np.array([value for value in values if value is not None], dtype=np.float64)
    if len(held) == 0:
        return Interval(None)
    mean = float(held.mean())
    if len(held) == 1:
        return Interval(mean)
    if np.ptp(held) == 0.0:
        return Interval(mean, mean, mean)
    found = bootstrap(
        (held,), np.mean, confidence_level=CONFIDENCE, n_resamples=RESAMPLES, method="percentile", rng=0
    )
    return Interval(mean, float(found.confidence_interval.low), float(found.confidence_interval.high))


def ratio_of(pairs: Sequence[tuple[float, float]]) -> Interval:
    """The mean of the first over the mean of the second, with a 95 % bootstrap interval over pairs.

    Not the mean of the pairs' ratios: where the second is next to nothing, as goodput is where nearly all
    requests are late, that pair's ratio would outweigh all others, and with nothing it would have none.
    No value where the second is 0 in all pairs; no bounds for a single pair, or where it is 0 in many
    resamples.
    """
    own, other = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    if not other.sum() > 0.0:
        return Interval(None)
    ratio = float(own.sum() / other.sum())
    if len(own) == 1:
        return Interval(ratio)
    drawn = np.random.default_rng(0).integers(len(own), size=(RESAMPLES, len(own)))
    above, below = own[drawn].sum(axis=1), other[drawn].sum(axis=1)
    ratios = np.divide(above, below, out=np.full(RESAMPLES, np.inf), where=below > 0.0)
    edge = 50.0 * (1.0 - CONFIDENCE)
    low, high = np.percentile(ratios, [edge, 100.0 - edge], method="nearest").tolist()
    return Interval(ratio, low, high) if np.isfinite(high) else Interval(ratio)


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """One policy at one point, over seeds.

    Attributes:
        policy: its label.
        num_seeds, num_requests, num_errors: runs, requests in them, and how many of those failed.
        attainment: share of requests that met their objectives. by_class: the same of each class.
        goodput_requests_per_s: requests that met theirs. goodput_tokens_per_s: tokens of requests that met
            the one for their time per token, whatever else they missed (AdaServe's).
        tpot_p50_ms, tpot_p95_ms: time per output token of completed requests.
        ttft_p95_ms: time to first token.
        accepted_per_step: draft tokens accepted per request and verify step, the bonus token not counted.
        step_ms: mean decode iteration; draft_ms, verify_ms: of those, waiting for drafters and the
            forward; other_ms: the rest (messages, scheduling, prefills in between).
        scheduler_ms: processor time of scheduling per iteration.
    """

    policy: str
    num_seeds: int
    num_requests: int
    num_errors: int
    attainment: Interval
    by_class: dict[str, Interval]
    goodput_requests_per_s: Interval
    goodput_tokens_per_s: Interval
    tpot_p50_ms: Interval
    tpot_p95_ms: Interval
    ttft_p95_ms: Interval
    accepted_per_step: Interval
    step_ms: Interval
    draft_ms: Interval
    verify_ms: Interval
    other_ms: Interval
    scheduler_ms: Interval


def step_parts(run: Mapping[str, Any]) -> dict[str, float | None]:
    """Milliseconds of a run's mean decode step by what they went into; None without a step."""
    steps = run["steps"]
    count, whole = steps["iterations"], steps["step_s"]
    if not count:
        return dict.fromkeys(("step", "draft", "verify", "other", "scheduler"))
    draft, verify = steps["step_draft_s"], steps["step_verify_s"]
    seconds = {
        "step": whole,
        "draft": draft,
        "verify": verify,
        "other": max(0.0, whole - draft - verify),
        "scheduler": steps["scheduler_s"],
    }
    return {name: 1e3 * value / count for name, value in seconds.items()}


def accepted_per_step(run: Mapping[str, Any]) -> float | None:
    """Draft tokens accepted per request and verify step; None where no receipt says."""
    receipts = run["report"]["total"]["receipts"]
    return receipts["num_accepted"] / receipts["num_steps"] if receipts and receipts["num_steps"] else None


def figures(policy: str, runs: Sequence[Mapping[str, Any]]) -> PolicyFigures:
    """One policy's figures from its runs at a point, one per seed."""
    totals = [run["report"]["total"] for run in runs]
    classes = sorted({part["domain"] for run in runs for part in run["report"]["by_class"]})

    def of_class(run: Mapping[str, Any], name: str) -> float | None:
        found = [part["attainment"] for part in run["report"]["by_class"] if part["domain"] == name]
        return found[0] if found else None

    parts = [step_parts(run) for run in runs]
    return PolicyFigures(
        policy=policy,
        num_seeds=len(runs),
        num_requests=sum(total["num_requests"] for total in totals),
        num_errors=sum(total["num_errors"] for total in totals),
        attainment=mean_of([total["attainment"] for total in totals]),
        by_class={name: mean_of([of_class(run, name) for run in runs]) for name in classes},
        goodput_requests_per_s=mean_of([total["goodput_requests_per_s"] for total in totals]),
        goodput_tokens_per_s=mean_of([total["goodput_tokens_per_s"] for total in totals]),
        tpot_p50_ms=mean_of([total["tpot"]["p50"] for total in totals]),
        tpot_p95_ms=mean_of([total["tpot"]["p95"] for total in totals]),
        ttft_p95_ms=mean_of([total["ttft"]["p95"] for total in totals]),
        accepted_per_step=mean_of([accepted_per_step(run) for run in runs]),
        step_ms=mean_of([part["step"] for part in parts]),
        draft_ms=mean_of([part["draft"] for part in parts]),
        verify_ms=mean_of([part["verify"] for part in parts]),
        other_ms=mean_of([part["other"] for part in parts]),
        scheduler_ms=mean_of([part["scheduler"] for part in parts]),
    )


@dataclass(frozen=True, slots=True)
class AgainstBest:
    """A policy beside the best of the others at one point, paired by seed.

    Attributes:
        policy, baseline: which are compared; the baseline has the highest mean attainment of the others.
        attainment_gain: difference in attainment, in shares.
        violations, baseline_violations: requests with objectives that missed one, summed over the seeds.
        violations_ratio: the baseline's over the policy's: 2 is half as many. None if there are none on
            either side; infinite if only the policy has none.
        goodput_ratio: goodput in tokens, mean over seeds, by the baseline's.
        goodput_over_plain: the same by plain decoding's; None where that was not run.
    """

    policy: str
    baseline: str
    attainment_gain: Interval
    violations: int
    baseline_violations: int
    violations_ratio: float | None
    goodput_ratio: Interval
    goodput_over_plain: Interval


def _violations(run: Mapping[str, Any]) -> int:
    """Of requests with objectives, as attainment is: one without any that failed has missed none."""
    total = run["report"]["total"]
    num_with_slo: int = total["num_with_slo"]
    return round(num_with_slo * (1.0 - (total["attainment"] or 0.0)))


def _goodput_ratio(
    runs: Mapping[int, Mapping[str, Any]], others: Mapping[int, Mapping[str, Any]] | None
) -> Interval:
    """Over the seeds that both have."""
    both = [(run, (others or {})[seed]) for seed, run in runs.items() if seed in (others or {})]
    return ratio_of([(_goodput(run), _goodput(other)) for run, other in both])


def _goodput(run: Mapping[str, Any]) -> float:
    goodput: float = run["report"]["total"]["goodput_tokens_per_s"]
    return goodput


def against_best(
    policy: str, runs: Mapping[str, Mapping[int, Mapping[str, Any]]], others: Sequence[str], plain: str
) -> AgainstBest | None:
    """The policy beside the best of `others`; None if there is nothing to compare.

    Args:
        policy: label.
        runs: by label and seed, all at one point.
        others: labels of the baselines.
        plain: label of plain decoding.
    """

    def attainment(label: str) -> float:
        shares = [run["report"]["total"]["attainment"] for run in runs[label].values()]
        return float(np.mean([share for share in shares if share is not None] or [-1.0]))

    present = [label for label in others if runs.get(label)]
    if not runs.get(policy) or not present:
        return None
    best = max(present, key=attainment)
    seeds = [seed for seed in runs[policy] if seed in runs[best]]
    mine = sum(_violations(runs[policy][seed]) for seed in seeds)
    theirs = sum(_violations(runs[best][seed]) for seed in seeds)
    gains = []
    for seed in seeds:
        ours = runs[policy][seed]["report"]["total"]["attainment"]
        other = runs[best][seed]["report"]["total"]["attainment"]
        gains.append(None if ours is None or other is None else ours - other)
    return AgainstBest(
        policy=policy,
        baseline=best,
        attainment_gain=mean_of(gains),
        violations=mine,
        baseline_violations=theirs,
        violations_ratio=(theirs / mine if mine else float("inf")) if mine or theirs else None,
        goodput_ratio=_goodput_ratio(runs[policy], runs[best]),
        goodput_over_plain=_goodput_ratio(runs[policy], runs.get(plain)),
    )


def by_policy(runs: Sequence[Mapping[str, Any]], point: str) -> dict[str, dict[int, Mapping[str, Any]]]:
    """Runs at a point, by label and seed."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for held in runs:
        if held["run"]["point"] == point:
            found.setdefault(held["run"]["policy"], {})[held["run"]["seed"]] = held
    return found
