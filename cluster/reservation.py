"""Ray placement groups of a cell: its plan reserved whole, and every worker's seat in it kept for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.placement import NODE_ID, Bundle, Demand, Plan, shortage
from cluster.placement_config import PlacementConfig, ResourcesConfig
from cluster.seats import Seat, Seats, give_up

_log = logging.getLogger(__name__)

# Ray is asked so often whether the resources are there.
POLL_S = 1


class Reservations:
    """The cell's placement groups.

    Args:
        options: Ray's for a new one. Without a lifetime there, Ray frees it when this process ends.
    """

    def __init__(self, options: Callable[[], dict[str, Any]] = dict) -> None:
        self._options = options
        self._seats: dict[str, Seat] = {}
        self._vacant: list[Seat] = []
        # Groups whose lost bundles Ray may place again, though nobody waits for them any more.
        self._left: list[Any] = []
        self._locks: dict[tuple[str, int], asyncio.Lock] = {}

    async def reserve(
        self,
        plan: Plan,
        placements: dict[str, ResourcesConfig],
        report: Callable[[str], None],
        *,
        is_alone: bool = False,
    ) -> None:
        """Reserve all of the plan's bundles or none, and wait until they are there.

        Args:
            plan: may be empty.
            placements: of the workers with a seat in it, by name.
            report: told, when it has to wait, what for.
            is_alone: whether the group goes when its one worker is removed.
        """
        if not plan.bundles:
            return
        group = placement_group(
            [bundle.resources for bundle in plan.bundles],
            strategy=plan.strategy,
            bundle_label_selector=[bundle.labels for bundle in plan.bundles],
            **self._options(),
        )
        told = ""
        try:
            while not await asyncio.to_thread(group.wait, POLL_S):
                told = await self._tell(plan, told, report)
        except BaseException:
            remove_placement_group(group)
            raise
        for name, placement in placements.items():
            index = plan.seat_of(name)
            if index is not None:
                self._seats[name] = Seat(group, plan, index, placement, is_alone)

    async def restore(self, name: str, avoid: Sequence[str], report: Callable[[str], None]) -> None:
        """Wait until a lost worker has a place again.

        Usually it has: a process died, and its bundle is there. When a node died, Ray places the group's
        lost bundles again all together or not at all; so that one that fits nowhere does not keep the
        others from coming back, each is also asked for by itself, and whichever is there first is taken.

        Args:
            name: of the worker.
            avoid: ids of nodes that are no place for a drafter with a node of its own.
            report: told what is waited for.
        """
        seat = self._seats.get(name)
        if seat is None or await _is_placed(seat):
            return
        key = (seat.group.id.hex(), seat.index)
        async with self._locks.setdefault(key, asyncio.Lock()):
            seat = self._seats.get(name)  # who sat beside it may have moved it
            if seat is None or await _is_placed(seat):
                return
            bundle = seat.plan.bundles[seat.index]
            labels = dict(bundle.labels)
            if isinstance(seat.placement, PlacementConfig) and seat.placement.collocate == "own-node":
                labels[NODE_ID] = f"!in({','.join(sorted(set(avoid)))})"
            plan = Plan("PACK", [Bundle(dict(bundle.resources), labels, list(bundle.seats))])
            other = None
            if len(seat.plan.bundles) > 1:
                other = placement_group([bundle.resources], bundle_label_selector=[labels], **self._options())
            if await self._first_placed(seat, other, plan, report):
                await asyncio.to_thread(give_up, other)
                return
            self._left.append(seat.group)
            for sitting, old in list(self._seats.items()):
                if old.group is seat.group and old.index == seat.index:
                    is_alone = len(bundle.seats) == 1
                    self._seats[sitting] = Seat(other, plan, 0, old.placement, is_alone)

    async def _first_placed(self, seat: Seat, other: Any, plan: Plan, report: Callable[[str], None]) -> bool:
        """Wait for the seat or the other group; whether it was the seat."""
        told = ""
        try:
            while not await _is_placed(seat):
                if other is None:
                    await asyncio.sleep(POLL_S)
                elif await asyncio.to_thread(other.wait, POLL_S):
                    return False
                told = await self._tell(plan, told, report)
        except BaseException:
            give_up(other)
            raise
        return True

    async def _tell(self, plan: Plan, told: str, report: Callable[[str], None]) -> str:
        """Say what the plan waits for, unless that is what was told last; what has been told now."""
        message = await self.explain(plan)
        if message != told:
            _log.warning("%s", message)
            report(message)
        return message

    def reuse(self, name: str, placement: ResourcesConfig) -> bool:
        """Give a new worker the seat of one that was removed and asked for the same; False without one."""
        for seat in self._vacant:
            if seat.placement == placement:
                self._vacant.remove(seat)
                self._seats[name] = seat
                return True
        return False

    def has_room(self, placement: ResourcesConfig) -> bool:
        """Whether what one more worker placed so reserves is free: in a seat that another left, or in Ray."""
        if any(seat.placement == placement for seat in self._vacant):
            return True
        needed = Demand.of(placement).amounts
        if not needed:
            return True
        free = ray.available_resources()
        return all(free.get(name, 0.0) >= amount for name, amount in needed.items())

    def vacate(self, name: str) -> None:
        """The worker is removed for good: a group of its own is freed, a bundle of the cell's stays."""
        seat = self._seats.pop(name, None)
        if seat is None:
            return
        if seat.is_alone:
            give_up(seat.group)
        else:
            self._vacant.append(seat)

    @property
    def seats(self) -> Seats:
        """All there are, for the cell that takes over."""
        return Seats(dict(self._seats), list(self._vacant), list(self._left))

    def take_over(self, seats: Seats) -> None:
        """What another cell reserved is this one's."""
        self._seats, self._vacant = dict(seats.taken), list(seats.vacant)
        self._left = list(seats.left)

    def release(self) -> None:
        """Free all, with whoever sits there."""
        self.seats.release()
        self._seats.clear()
        self._vacant.clear()

    def options(self, name: str, placement: ResourcesConfig) -> dict[str, Any]:
        """Ray's options for the worker's actor: back into its bundle, whenever it is made again."""
        demand = Demand.of(placement)
        options: dict[str, Any] = {
            "num_cpus": demand.num_cpus,
            "num_gpus": demand.num_gpus,
            "resources": dict(demand.resources),
        }
        seat = self._seats.get(name)
        if seat is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(seat.group, seat.index)
        return options

    async def node_of(self, name: str) -> str:
        """Id of the node that the worker's bundle is on; empty if it has none."""
        seat = self._seats.get(name)
        return "" if seat is None else await asyncio.to_thread(_node_of, seat)

    async def has_place(self, name: str) -> bool:
        """Whether the worker's bundle is on a living node, or it needs none."""
        seat = self._seats.get(name)
        return seat is None or await _is_placed(seat)

    async def explain_seat(self, name: str) -> str:
        """What the worker waits for, when its actor does not start."""
        seat = self._seats.get(name)
        if seat is None:
            return "waiting for a process: the node is slow, or the cluster full"
        if await _is_placed(seat):
            return "waiting for a process: what it reserves is there, the node is slow"
        return await self.explain(Plan(seat.plan.strategy, [seat.plan.bundles[seat.index]]))

    async def explain(self, plan: Plan) -> str:
        """What the plan waits for (`cluster.placement.shortage`)."""
        nodes = await asyncio.to_thread(ray.nodes)
        return shortage(plan, [node for node in nodes if node["Alive"]])


async def _is_placed(seat: Seat) -> bool:
    """Whether the seat's bundle is on a node that lives, as far as Ray knows."""
    return await asyncio.to_thread(_look_up, seat)


def _look_up(seat: Seat) -> bool:
    node_id = _node_of(seat)
    return any(node["Alive"] and node["NodeID"] == node_id for node in ray.nodes())


def _node_of(seat: Seat) -> str:
    return str(placement_group_table(seat.group)["bundles_to_node_id"].get(seat.index, ""))
