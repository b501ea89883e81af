"""What `flotilla bench compare` runs: policies, points of load, seeds, and in which order."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import yaml
from pydantic import ValidationError

from cluster.config import FlotillaConfig, PolicyConfig, SchedulerConfig
from cluster.config_errors import wrong_fields
from cluster.policies.own import own_policy
from cluster.policies.registry import POLICIES
from engine.own_classes import is_own

OURS = "flotilla"
PLAIN = "autoregressive"
# What the papers' policies are run with: our batching rule weighs objectives too, and is part of our default.
PLAIN_BATCHING = "sarathi"
DEFAULT_POLICIES = (
    PLAIN,
    "fixed",
    "specinfer",
    "smartspec",
    "specserve",
    "adaserve",
    "adaptive-verification",
    OURS,
)
# From nearly idle to beyond what plain decoding sustains, as shares of its saturation throughput.
DEFAULT_RATES = ("0.1x", "0.3x", "0.5x", "0.7x", "0.9x", "1.1x")


@dataclass(frozen=True, slots=True)
class Entrant:
    """A policy with its settings.

    Attributes:
        label: as it was asked for; its name in results.
        policy, scheduler: all fields of these sections of the configuration.
    """

    label: str
    policy: Mapping[str, Any] = field(hash=False)
    scheduler: Mapping[str, Any] = field(hash=False)

    @property
    def is_ours(self) -> bool:
        """Whether it is the default policy, perhaps with other settings."""
        return bool(self.policy["name"] == OURS)


def parse_entrant(text: str, config: FlotillaConfig) -> Entrant:
    """A policy from `NAME` or `NAME:FIELD=VALUE,FIELD=VALUE`, over the settings of a configuration.

    `NAME` may be the import path of one's own.

    Fields are those of the policy and of the scheduler, as in `fixed:fixed_depth=2` or
    `autoregressive:batching=priority`; values are YAML. Our batching rule belongs to our policy: the others
    have plain chunked prefill unless told otherwise.

    Raises:
        ValueError: for an unknown policy, field or value.
    """
    name, _, settings = text.partition(":")
    if is_own(name):
        own_policy(PolicyConfig(name=name))
    elif name not in POLICIES:
        raise ValueError(f"unknown policy `{name}`; known: {', '.join(sorted(POLICIES))}")
    raw = config.model_dump()
    raw["policy"]["name"] = name
    if name != OURS and raw["scheduler"]["batching"] == OURS:
        raw["scheduler"]["batching"] = PLAIN_BATCHING
    # Lists are written in brackets, and commas within them do not part fields.
    for setting in filter(None, re.split(r",(?![^\[]*\])", settings)):
        key, equals, value = setting.partition("=")
        section = "policy" if key in PolicyConfig.model_fields else "scheduler"
        if not equals or key not in raw[section]:
            fields = sorted({*PolicyConfig.model_fields, *SchedulerConfig.model_fields} - {"name"})
            raise ValueError(f"--policy {text}: `{setting}` is not FIELD=VALUE; fields: {', '.join(fields)}")
        raw[section][key] = yaml.safe_load(value)
    try:
        merged = FlotillaConfig.model_validate(raw)
    except ValidationError as error:
        wrong = "; ".join(wrong_fields(error, whole="the policy", model=FlotillaConfig))
        raise ValueError(f"--policy {text}: {wrong}") from None
    return Entrant(text, merged.policy.model_dump(mode="json"), merged.scheduler.model_dump(mode="json"))


@dataclass(frozen=True, slots=True)
class Rate:
    """Requests per second, or a share of the saturation throughput of plain decoding if `relative`."""

    value: float
    relative: bool = False

    def resolve(self, saturation: float | None) -> float:
        """Requests per second."""
        if not self.relative:
            return self.value
        if saturation is None:
            raise ValueError(f"the rate {self.value:g}x needs a measured saturation throughput")
        return self.value * saturation


def parse_rate(text: str) -> Rate:
    """A rate from `4` (requests per second) or `0.5x` (of the saturation throughput).

    >>> parse_rate("0.5x")
    Rate(value=0.5, relative=True)
    """
    relative = text.endswith("x")
    try:
        value = float(text.removesuffix("x"))
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise ValueError(f"--rate {text}: neither requests per second (4) nor a share of saturation (0.5x)")
    return Rate(value, relative)


@dataclass(frozen=True, slots=True)
class Point:
    """One place of the sweep, the same for all policies; None is whatever the workload says.

    Attributes:
        rate: requests per second as asked for.
        urgent_share: share of urgent requests (AdaServe figure 10).
        slo_scale: TPOT objective of urgent requests over the baseline latency (AdaServe figure 11).
    """

    rate: Rate | None = None
    urgent_share: float | None = None
    slo_scale: float | None = None

    @property
    def key(self) -> str:
        """Its name in files."""
        parts = []
        if self.rate is not None:
            parts.append(f"rate={self.rate.value:g}{'x' if self.rate.relative else ''}")
        if self.urgent_share is not None:
            parts.append(f"urgent={self.urgent_share:g}")
        if self.slo_scale is not None:
            parts.append(f"scale={self.slo_scale:g}")
        return ",".join(parts) or "workload"


def points_of(
    rates: Sequence[Rate], urgent_shares: Sequence[float], slo_scales: Sequence[float]
) -> list[Point]:
    """All combinations, in the order given; an empty list leaves that axis to the workload."""
    axes: tuple[Sequence[Rate | None], Sequence[float | None], Sequence[float | None]]
    axes = (rates or (None,), urgent_shares or (None,), slo_scales or (None,))
    return [Point(rate, share, scale) for rate, share, scale in itertools.product(*axes)]


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement: a policy at a point, with the requests of a seed."""

    policy: str
    point: str
    seed: int


def schedule(policies: Sequence[str], points: Sequence[str], seeds: Sequence[int]) -> list[Run]:
    """Every policy at every point with every seed, in rounds of one seed each.

    In a round the points come in random order, and at each point all policies, again in random order, one
    right after the other: what drifts on the machine meets all of them alike.
    """
    runs = []
    for seed in seeds:
        rng = np.random.default_rng((seed, 3))
        for point in rng.permutation(len(points)):
            order = rng.permutation(len(policies))
            runs += [Run(policies[place], points[point], seed) for place in order]
    return runs
