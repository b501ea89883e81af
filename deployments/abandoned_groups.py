"""Placement groups that no cell has any more, and that nobody else would free."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable

from ray.util import get_placement_group, placement_group_table

from cluster.seats import give_up
from cluster.takeover import group_prefix, living_lineages

_log = logging.getLogger(__name__)

_LOOK_S = 2.0
#: A group without workers is abandoned when no cell has named its lineage for so long.
EMPTY_AFTER_S = 10.0


class AbandonedGroups:
    """What cells reserved that ended without freeing it: a cell's groups outlive it for the next one.

    Time is whatever the caller passes, in seconds.

    Args:
        system: name of the application.
        after_s: a group with workers is abandoned when no cell has named its lineage for so long.
    """

    def __init__(self, system: str, after_s: float) -> None:
        self.system = system
        self._prefix = group_prefix(system)
        self._after_s = after_s
        self._heard_at: dict[str, float] = {}

    def heard(self, lineage: str, now: float) -> None:
        """A cell says that what is reserved under this name is its own."""
        self._heard_at[lineage] = now

    def among(self, names: Iterable[str], living: Collection[str], now: float) -> list[str]:
        """Those of the groups so named that are abandoned; other systems' are not looked at.

        Args:
            names: of placement groups.
            living: lineages of which there are workers, who may wait for another cell.
            now: the present.
        """
        own = [name for name in names if name.startswith(self._prefix)]
        lineages = {name: name.removeprefix(self._prefix).partition(":")[0] for name in own}
        recent = {lineage for lineage, at in self._heard_at.items() if now - at <= self._after_s}
        # Who begins to look has not heard of anybody yet.
        self._heard_at = {name: self._heard_at.get(name, now) for name in {*lineages.values(), *recent}}

        def may_stay_s(lineage: str) -> float:
            return self._after_s if lineage in living else min(EMPTY_AFTER_S, self._after_s)

        silent_s = {lineage: now - self._heard_at[lineage] for lineage in lineages.values()}
        return [name for name in own if silent_s[lineages[name]] > may_stay_s(lineages[name])]


async def free_abandoned(groups: AbandonedGroups) -> None:
    """Look again and again for abandoned groups, and free them; never returns."""
    while True:
        await asyncio.sleep(_LOOK_S)
        try:
            names, living = await asyncio.to_thread(_look, groups.system)
            for name in groups.among(names, living, time.monotonic()):
                _log.warning("freeing %s, which a cell that is gone had reserved", name)
                await asyncio.to_thread(_free, name)
        except Exception:  # Ray: it may pass, and there is time
            _log.exception("could not look for placement groups of cells that are gone")


def _look(system: str) -> tuple[list[str], set[str]]:
    table = placement_group_table().values()
    names = [group["name"] for group in table if group["name"] and group["state"] != "REMOVED"]
    return names, living_lineages(system)


def _free(name: str) -> None:
    give_up(get_placement_group(name))
