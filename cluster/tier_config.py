"""Service tiers: objectives, priority and share of the queue that a request has by naming one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from cluster.placement_config import StrictModel

# A number of milliseconds, or a multiple of what the cell takes for the request by itself, such as "1.2x".
Target = float | str

# The tier of requests that name none.
DEFAULT_TIER = "default"
# Most that a request may name; one that names the empty tier names none.
MOST_NAME_CHARACTERS = 64
TierName = Annotated[str, Field(min_length=1, max_length=MOST_NAME_CHARACTERS)]
# Largest objective: longer than any request is served.
MOST_MS = 1e7
MOST_MULTIPLE = 1e4
# Share of the queue open to tiers less urgent than the default one, unless configured.
BACKGROUND_SHARE = 0.5

_MULTIPLE = re.compile(r"(\d{1,6}(?:\.\d{1,6})?|\.\d{1,6})x")

OnMiss = Literal["serve", "downgrade", "reject"]


def multiple_of(text: str) -> float:
    """The factor in a relative objective such as "1.2x".

    Raises:
        ValueError: if it is none, or out of range.
    """
    match = _MULTIPLE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f'"{text[:40]}" is neither a number of milliseconds nor a multiple such as "1.2x"')
    factor = float(match[1])
    if not 0.0 < factor <= MOST_MULTIPLE:
        raise ValueError(f'"{text[:40]}" must be above 0x and at most {MOST_MULTIPLE:g}x')
    return factor


def check_target(target: Target) -> Target:
    """The target, a number as a float.

    Raises:
        ValueError: if it is neither milliseconds in range nor a multiple.
    """
    if isinstance(target, str):
        multiple_of(target)
        return target
    if not 0.0 < target <= MOST_MS:  # nor is what is not a number, or too large a whole one for a float
        raise ValueError(f"{str(target)[:40]} ms must be above 0 and at most {MOST_MS:g}")
    return float(target)


def resolve(target: Target, baseline_ms: float) -> float:
    """The target in milliseconds."""
    return multiple_of(target) * baseline_ms if isinstance(target, str) else target


TargetField = Annotated[float | str, AfterValidator(check_target)]


class TierConfig(StrictModel):
    """Objectives of a service tier, used where a request names none; see docs/objectives.md."""

    tpot_ms: TargetField | None = Field(
        default=None,
        description='Mean time per output token, ms, or a multiple such as `"1.2x"` of what one request by '
        "itself takes without speculation.",
    )
    ttft_ms: TargetField | None = Field(
        default=None, description="Time to the first token, ms or a multiple likewise."
    )
    e2e_ms: TargetField | None = Field(
        default=None,
        description="Time to the last token, ms or a multiple likewise; for all of `max_tokens`.",
    )
    priority: int = Field(
        default=0, ge=-(1 << 31), lt=1 << 31, description="Lower is earlier; a request may name its own."
    )
    downgrade_to: str | None = Field(
        default=None, description="Tier that serves a request predicted to miss its objectives here."
    )
    on_miss: OnMiss | None = Field(
        default=None,
        description="What is done with such a request: `serve` it all the same, `downgrade` it, or `reject` "
        "it; if unset, `downgrade` where `downgrade_to` is set and `serve` where not.",
    )
    queue_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of `scheduler.max_waiting` past which newcomers of this tier are refused; if "
        f"unset, 1, or {BACKGROUND_SHARE} where `priority` is above 0.",
    )
    weight: float = Field(
        default=1.0,
        gt=0,
        le=1e6,
        description="What its tokens weigh when API keys compete: a key gets so many times as many of this "
        "tier as of one with weight 1.",
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> TierConfig:
        if self.on_miss == "downgrade" and self.downgrade_to is None:
            raise ValueError("`on_miss: downgrade` needs `downgrade_to`")
        ttft, e2e = self.ttft_ms, self.e2e_ms
        if isinstance(ttft, float) and isinstance(e2e, float) and ttft > e2e:
            raise ValueError(f"ttft_ms {ttft:g} is above e2e_ms {e2e:g}")
        return self

    @property
    def miss_rule(self) -> OnMiss:
        """What is done with a request predicted to miss, unless it says itself."""
        if self.on_miss is not None:
            return self.on_miss
        return "serve" if self.downgrade_to is None else "downgrade"

    @property
    def open_share(self) -> float:
        """Share of the queue open to newcomers of the tier."""
        if self.queue_share is not None:
            return self.queue_share
        return BACKGROUND_SHARE if self.priority > 0 else 1.0


def downgrades(name: str, tiers: Mapping[str, TierConfig]) -> list[str]:
    """Tiers below the named one, best first; ends before a tier would come twice."""
    below: list[str] = []
    tier = tiers.get(name)
    while tier is not None and tier.downgrade_to is not None and tier.downgrade_to not in (name, *below):
        below.append(tier.downgrade_to)
        tier = tiers.get(tier.downgrade_to)
    return below


def _check_downgrades(tiers: dict[str, TierConfig]) -> dict[str, TierConfig]:
    """Raises ValueError if a tier is downgraded to one that is not there, or round in a circle."""
    for name, tier in tiers.items():
        seen, below = [name], tier.downgrade_to
        while below is not None:
            if below not in tiers and below != DEFAULT_TIER:
                there = ", ".join((*tiers, DEFAULT_TIER))
                raise ValueError(f"tier `{seen[-1]}`: downgrade_to names `{below}`; the tiers are: {there}")
            if below in seen:
                raise ValueError(f"tiers are downgraded in a circle: {' -> '.join((*seen, below))}")
            seen.append(below)
            below = tiers[below].downgrade_to if below in tiers else None
    return tiers


#: All tiers by their names; each is downgraded to one that is there.
Tiers = Annotated[dict[TierName, TierConfig], AfterValidator(_check_downgrades)]
