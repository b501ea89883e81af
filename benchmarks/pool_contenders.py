"""What `flotilla bench pool` sets side by side: each drafter alone, and the pool under each selector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PLAIN = "no speculation"
ORACLE = "oracle"
ALONE = "alone: "
POOL = "pool: "


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to serve the same prompts.

    Attributes:
        label: its name in results.
        drafters: kinds that every request may use; empty allows all.
        selector: fields of the configuration's `selector` section; empty leaves them as they are.
        speculates: whether drafts are made at all.
        by_prompt: whether each prompt is given its own drafter, from what the drafters did alone.
    """

    label: str
    drafters: tuple[str, ...] = ()
    selector: Mapping[str, Any] = field(default_factory=dict, hash=False)
    speculates: bool = True
    by_prompt: bool = False


def contenders(drafters: Sequence[str], selectors: Sequence[str]) -> list[Contender]:
    """No speculation, each drafter alone (SPIN's homogeneous baselines), the pool by selector, the oracle.

    The oracle comes last: it is told which drafter alone was fastest on each prompt of the round.

    Raises:
        ValueError: without drafters or selectors.
    """
    if not drafters or not selectors:
        raise ValueError("a pool is compared with at least one drafter and one selector")
    # Named twice, one takes part once.
    alone = [Contender(f"{ALONE}{name}", drafters=(name,)) for name in dict.fromkeys(drafters)]
    pool = [Contender(f"{POOL}{name}", selector={"name": name}) for name in dict.fromkeys(selectors)]
    return [
        Contender(PLAIN, speculates=False),
        *alone,
        *pool,
        Contender(ORACLE, by_prompt=True),
    ]
