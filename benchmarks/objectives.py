"""Latency objectives of benchmark requests: parsing `--slo`, and resolving relative ones by a baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

METRICS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives in milliseconds; None is no objective."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to meet."""
        return self.ttft_ms is None and self.tpot_ms is None and self.e2e_ms is None


@dataclass(frozen=True, slots=True)
class Limit:
    """One objective: milliseconds, or a multiple of the baseline latency if `relative`."""

    value: float
    relative: bool = False

    def resolve(self, metric: str, baseline_ms: float | None) -> float:
        """The limit in milliseconds.

        Args:
            metric: of which it is one, for the error.
            baseline_ms: what a relative one is a multiple of.

        Raises:
            ValueError: for a relative one without a baseline.
        """
        if not self.relative:
            return self.value
        if baseline_ms is None:
            raise ValueError(
                f"the objective {metric}={self.value:g}x is a multiple of a baseline, and there is none of "
                f"{metric} here: give it in milliseconds"
            )
        return self.value * baseline_ms


@dataclass(frozen=True, slots=True)
class SloSpec:
    """Objectives as asked for; `resolve` makes them absolute."""

    ttft: Limit | None = None
    tpot: Limit | None = None
    e2e: Limit | None = None

    @property
    def needs_baseline(self) -> bool:
        """Whether any objective is relative."""
        return any(limit is not None and limit.relative for limit in (self.ttft, self.tpot, self.e2e))

    def resolve(self, baseline: Slo | None) -> Slo:
        """Absolute objectives, given the latencies measured without speculation at concurrency 1."""
        base = baseline or Slo()
        return Slo(
            ttft_ms=None if self.ttft is None else self.ttft.resolve("ttft", base.ttft_ms),
            tpot_ms=None if self.tpot is None else self.tpot.resolve("tpot", base.tpot_ms),
            e2e_ms=None if self.e2e is None else self.e2e.resolve("e2e", base.e2e_ms),
        )


NO_SLO = Slo()
NO_SLO_SPEC = SloSpec()


def _parse_limit(text: str, option: str) -> Limit:
    relative = text.endswith("x")
    number = text[:-1] if relative else text.removesuffix("ms")
    try:
        value = float(number)
    except ValueError:
        raise ValueError(
            f"--slo {option}: {text!r} is neither milliseconds (30) nor a multiple (1.2x)"
        ) from None
    if not value > 0 or value == float("inf"):
        raise ValueError(f"--slo {option}: {text!r} must be positive and finite")
    return Limit(value, relative)


def parse_slos(options: Sequence[str]) -> dict[str, SloSpec]:
    """Objectives by class from `--slo` options; the class `*` stands for all not named.

    An option is a list of `CLASS:LIMIT` parted by commas. A limit is `tpot=30`, `ttft=200`, `e2e=1000`
    (milliseconds), a multiple of the baseline as in `ttft=3x`, or plainly `1.2x` for the time per output
    token; a part without a class belongs to the class before it.

    >>> parse_slos(["code:tpot=30,ttft=200", "chat:2x"])["chat"]
    SloSpec(ttft=None, tpot=Limit(value=2.0, relative=True), e2e=None)
    """
    limits: dict[str, dict[str, Limit]] = {}
    for option in options:
        domain = None
        for part in option.split(","):
            head, colon, limit = part.strip().rpartition(":")
            if colon:
                domain = head
            if not domain:
                raise ValueError(f"--slo {option}: name a class first, as in code:tpot=30 (or *:tpot=30)")
            metric, equals, value = limit.partition("=")
            if not equals:
                metric, value = "tpot", limit
            if metric not in METRICS:
                raise ValueError(f"--slo {option}: {metric!r} is none of {', '.join(METRICS)}")
            limits.setdefault(domain, {})[metric] = _parse_limit(value, option)
    return {
        domain: SloSpec(ttft=given.get("ttft"), tpot=given.get("tpot"), e2e=given.get("e2e"))
        for domain, given in limits.items()
    }


def spec_for(domain: str, specs: Mapping[str, SloSpec], default: SloSpec) -> SloSpec:
    """The objectives of a class: its own, else those of `*`, else the request's own."""
    return specs.get(domain, specs.get("*", default))
