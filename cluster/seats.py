"""The places of workers in Ray's placement groups, as one cell leaves them to the next."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

from ray.util import remove_placement_group

from cluster.placement import Plan
from cluster.placement_config import ResourcesConfig


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker's place: a bundle of a group, and whether the group is there for it alone."""

    group: Any
    plan: Plan
    index: int
    placement: ResourcesConfig
    is_alone: bool


@dataclass(frozen=True, slots=True)
class Seats:
    """Those of a cell.

    Attributes:
        taken: by worker name.
        vacant: whose workers were removed.
        left: groups in which somebody had a seat until its node was lost.
    """

    taken: dict[str, Seat] = field(default_factory=dict)
    vacant: list[Seat] = field(default_factory=list)
    left: list[Any] = field(default_factory=list)

    def release(self) -> None:
        """Free what is reserved, with whoever sits there."""
        seated = (seat.group for seat in (*self.taken.values(), *self.vacant))
        for group in {group.id: group for group in (*seated, *self.left)}.values():
            give_up(group)


def give_up(group: Any) -> None:
    """Free a placement group; nothing for None."""
    if group is not None:
        with contextlib.suppress(Exception):  # it may be gone with its node
            remove_placement_group(group)
