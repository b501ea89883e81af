"""Placement groups that no cell has any more, and that nobody else would free."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from ray.util import get_placement_group, placement_group_table

from cluster.seats import give_up
from cluster.takeover import group_prefix

_log = logging.getLogger(__name__)

# What is abandoned may stay so for a little longer.
_LOOK_S = 15.0


class AbandonedGroups:
    """What cells reserved that ended without freeing it: a cell's groups outlive it for the next one.

    Time is whatever the caller passes, in seconds.

    Args:
        system: name of the application.
        after_s: a group is abandoned when no cell has named its lineage for so long.
    """

    def __init__(self, system: str, after_s: float) -> None:
        self._prefix = group_prefix(system)
        self._after_s = after_s
        #: How often to look, seconds.
        self.look_s = min(_LOOK_S, after_s / 2)
        self._heard_at: dict[str, float] = {}

    def heard(self, lineage: str, now: float) -> None:
        """A cell says that what is reserved under this name is its own."""
        self._heard_at[lineage] = now

    def among(self, names: Iterable[str], now: float) -> list[str]:
        """Those of the groups so named that are abandoned; other systems' are not looked at."""
        own = [name for name in names if name.startswith(self._prefix)]
        lineages = {name: name.removeprefix(self._prefix).partition(":")[0] for name in own}
        recent = {lineage for lineage, at in self._heard_at.items() if now - at <= self._after_s}
        # Who begins to look has not heard of anybody yet.
        self._heard_at = {name: self._heard_at.get(name, now) for name in {*lineages.values(), *recent}}
        return [name for name in own if now - self._heard_at[lineages[name]] > self._after_s]


async def free_abandoned(groups: AbandonedGroups) -> None:
    """Look again and again for abandoned groups, and free them; never returns."""
    while True:
        await asyncio.sleep(groups.look_s)
        try:
            for name in groups.among(await asyncio.to_thread(_names), time.monotonic()):
                _log.warning("freeing %s, which a cell that is gone had reserved", name)
                await asyncio.to_thread(_free, name)
        except Exception:  # Ray: it may pass, and there is time
            _log.exception("could not look for placement groups of cells that are gone")


def _names() -> list[str]:
    table = placement_group_table().values()
    return [group["name"] for group in table if group["name"] and group["state"] != "REMOVED"]


def _free(name: str) -> None:
    give_up(get_placement_group(name))
