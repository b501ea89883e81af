"""Objectives of a request: from what a client asked for, by body, headers or tier, to what a cell is told.

Pure functions without HTTP or gRPC types; docs/objectives.md is the contract.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.baseline import Baseline
from cluster.stream_messages import Objective, Terms
from cluster.tier_config import (
    DEFAULT_TIER,
    OnMiss,
    Target,
    TierConfig,
    check_target,
    downgrades,
    resolve,
)

#: The latencies there are objectives for, as fields of `slo`, of a tier and of `Objective`.
LATENCIES = ("tpot_ms", "ttft_ms", "e2e_ms")

#: Headers for clients that cannot change the body (llm-d's names, and those they had before).
HEADERS = {
    "tpot_ms": ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"),
    "ttft_ms": ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"),
}

#: OpenAI's tiers, accepted also where none is configured under that name.
OPENAI_TIERS = ("auto", "default", "flex", "scale", "priority")


class ObjectiveError(ValueError):
    """An objective that is nonsense, contradicts another, or cannot be resolved here.

    Attributes:
        place: the field or header at fault.
        message: for people: what was wrong and what to do.
    """

    def __init__(self, place: str, message: str) -> None:
        super().__init__(message)
        self.place = place
        self.message = message


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asked for itself.

    Attributes:
        targets: by latency, the target and the place it was named at (for errors).
        on_miss: what to do if it is predicted to miss; None leaves it to the tier.
    """

    targets: Mapping[str, tuple[Target, str]] = field(default_factory=dict)
    on_miss: OnMiss | None = None


@dataclass(frozen=True, slots=True)
class Contract:
    """What the cell is told.

    Attributes:
        terms: on which the request is to be served.
        on_miss: what is done if it is predicted to miss them.
        downgrades: the terms it may be given then, best first.
    """

    terms: Terms
    on_miss: OnMiss = "serve"
    downgrades: tuple[Terms, ...] = ()

    @property
    def has_e2e(self) -> bool:
        """Whether a time to the last token is aimed at, on any of the terms."""
        return any(one.objective.e2e_ms is not None for one in (self.terms, *self.downgrades))


def asked_by_fields(slo: Mapping[str, Target | None], on_miss: OnMiss | None = None) -> Asked:
    """From the fields of a body's `slo`, each by its name in `LATENCIES`; raises `ObjectiveError`."""
    targets = {}
    for name in LATENCIES:
        target = slo.get(name)
        if target is not None:
            targets[name] = (_checked(target, f"slo.{name}"), f"slo.{name}")
    return Asked(targets, on_miss)


def asked_by_headers(headers: Mapping[str, str]) -> Asked:
    """From headers (or gRPC metadata), names in lower case; raises `ObjectiveError`.

    A header is milliseconds or a multiple, as a field is. The same objective under both its names must
    be the same.
    """
    targets: dict[str, tuple[Target, str]] = {}
    for latency, names in HEADERS.items():
        for name in names:
            text = headers.get(name)
            if text is None:
                continue
            target = _checked(_read(text, name), name)
            before = targets.setdefault(latency, (target, name))
            if before[0] != target:
                raise ObjectiveError(
                    name,
                    f"`{name}` is {text.strip()[:40]}, but `{before[1]}` is {before[0]}; send one of them.",
                )
    return Asked(targets)


def first_of(body: Asked, headers: Asked) -> Asked:
    """What holds of both: the body's where it names a latency, else the header's."""
    return Asked({**headers.targets, **body.targets}, body.on_miss or headers.on_miss)


def contract(
    asked: Asked,
    service_tier: str | None,
    priority: int | None,
    tiers: Mapping[str, TierConfig],
    baseline: Baseline | None,
    num_prompt: int,
    max_tokens: int,
) -> Contract:
    """What a request is to be served on; raises `ObjectiveError`.

    A latency has the target that the client named, else the tier's; likewise the priority.

    Args:
        asked: by the client itself.
        service_tier: the tier it named, if any.
        priority: the priority it named, if any.
        tiers: those configured.
        baseline: of the cell; None where unknown.
        num_prompt, max_tokens: tokens of its prompt, and most of its output.
    """
    name = tier_name(service_tier, tiers)
    tier = tiers.get(name, TierConfig())
    own = _objective(
        {latency: asked.targets.get(latency) for latency in LATENCIES}, baseline, num_prompt, max_tokens
    )
    if own.ttft_ms is not None and own.e2e_ms is not None and own.ttft_ms > own.e2e_ms:
        place = asked.targets["ttft_ms"][1]
        raise ObjectiveError(
            place,
            f"`{place}` is {own.ttft_ms:g} ms, above `{asked.targets['e2e_ms'][1]}` of {own.e2e_ms:g} ms: "
            "the first token cannot come after the last.",
        )
    rest = _tier_objective(name, tier, baseline, num_prompt, max_tokens)
    objective = Objective(
        tpot_ms=rest.tpot_ms if own.tpot_ms is None else own.tpot_ms,
        ttft_ms=rest.ttft_ms if own.ttft_ms is None else own.ttft_ms,
        e2e_ms=rest.e2e_ms if own.e2e_ms is None else own.e2e_ms,
    )
    terms = Terms(tier=name, objective=objective, priority=tier.priority if priority is None else priority)
    on_miss: OnMiss = asked.on_miss or tier.miss_rule
    if on_miss != "downgrade":
        return Contract(terms, on_miss)
    below = downgrades(name, tiers)
    if not below:
        raise ObjectiveError(
            "slo.on_miss",
            f"`slo.on_miss` is downgrade, but the tier '{name}' has no `downgrade_to` in the server's "
            "configuration; ask for serve or reject.",
        )
    lower = []
    for lower_name in below:
        lower_tier = tiers.get(lower_name, TierConfig())
        lower.append(
            Terms(
                tier=lower_name,
                objective=_tier_objective(lower_name, lower_tier, baseline, num_prompt, max_tokens),
                priority=max(terms.priority, lower_tier.priority),
            )
        )
    return Contract(terms, on_miss, tuple(lower))


def tier_name(service_tier: str | None, tiers: Mapping[str, TierConfig]) -> str:
    """The tier a request is in; raises `ObjectiveError` for one that is not there."""
    name = service_tier or DEFAULT_TIER
    if name not in tiers and name not in OPENAI_TIERS:
        raise ObjectiveError(
            "service_tier",
            f"`service_tier` is '{name}', but the tiers here are: {', '.join((*tiers, *OPENAI_TIERS))}.",
        )
    return DEFAULT_TIER if name == "auto" and name not in tiers else name


def _objective(
    targets: Mapping[str, tuple[Target, str] | None],
    baseline: Baseline | None,
    num_prompt: int,
    max_tokens: int,
) -> Objective:
    """In milliseconds, multiples resolved."""

    def milliseconds(latency: str) -> float | None:
        named = targets.get(latency)
        if named is None:
            return None
        target, place = named
        if not isinstance(target, str):
            return target
        if baseline is None:
            raise ObjectiveError(
                place,
                f"`{place}` is {target}, a multiple of what the cell takes for one request, which this cell "
                "does not tell; give milliseconds.",
            )
        return resolve(target, baseline_ms(latency, baseline, num_prompt, max_tokens))

    return Objective(*map(milliseconds, LATENCIES))


def baseline_ms(latency: str, baseline: Baseline, num_prompt: int, max_tokens: int) -> float:
    """What a multiple of this latency is a multiple of, in milliseconds."""
    if latency == "tpot_ms":
        return baseline.tpot_ms(num_prompt)
    if latency == "ttft_ms":
        return baseline.ttft_ms(num_prompt)
    return baseline.e2e_ms(num_prompt, max_tokens)


def _tier_objective(
    name: str, tier: TierConfig, baseline: Baseline | None, num_prompt: int, max_tokens: int
) -> Objective:
    named = {"tpot_ms": tier.tpot_ms, "ttft_ms": tier.ttft_ms, "e2e_ms": tier.e2e_ms}
    place = f"tiers.{name}"
    targets = {latency: None if target is None else (target, place) for latency, target in named.items()}
    return _objective(targets, baseline, num_prompt, max_tokens)


def _read(text: str, place: str) -> Target:
    """A header's text: a multiple stays a string, anything else must be a number."""
    text = text.strip()
    if text.endswith("x"):
        return text
    try:
        return float(text)
    except ValueError:
        raise ObjectiveError(
            place, f'`{place}` is "{text[:40]}"; give milliseconds such as 40, or a multiple such as 1.2x.'
        ) from None


def _checked(target: Target, place: str) -> Target:
    try:
        return check_target(target)
    except ValueError as error:
        raise ObjectiveError(place, f"`{place}`: {error}.") from None
