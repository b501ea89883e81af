"""The pool follows what its scaling decides, also where drafters come and go meanwhile."""

from __future__ import annotations

from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster.config import FlotillaConfig
from cluster.placement import Plan
from cluster.placement_config import PlacementConfig
from cluster.pool_scaling import PoolScaling
from cluster.reservation import Reservations
from cluster.seats import Seat, Seats


async def test_a_kind_that_is_removed_just_then_and_added_again_is_scaled_again() -> None:
    raw = {
        "target": {"path": "unused"},
        "drafters": [{"kind": "prompt_lookup", "name": "lookup"}],
        "scaling": {"drafters": {"enabled": True, "sustained_s": 0.0, "cooldown_s": 0.0}},
    }
    config = FlotillaConfig.model_validate(raw)
    changes: list[Coroutine[Any, Any, None]] = []
    kinds = {drafter.name: drafter for drafter in config.drafters}
    alive = SimpleNamespace(state="ready")
    lifecycle = SimpleNamespace(
        target=SimpleNamespace(num_slots=1),
        kinds=kinds,
        of_kind=lambda kind: [alive],
        spawn=changes.append,
        has_room=lambda config: True,
    )
    selector = SimpleNamespace(prices=lambda: {"lookup": 1e3})
    core = SimpleNamespace(running={"a": None}, pool=SimpleNamespace(drafters={}, selector=selector))
    asked: list[int] = []

    async def scale(kind: str, replicas: int, wait_s: float) -> None:
        asked.append(replicas)

    parts = (lifecycle, SimpleNamespace(scale=scale), SimpleNamespace(core=core))
    scaling = PoolScaling(config, *cast(Any, parts))
    scaling.look(0.0)
    (removed,) = kinds.items()
    kinds.clear()
    await changes.pop()
    assert not asked
    kinds.update([removed])
    scaling.look(100.0)
    assert len(changes) == 1
    changes.pop().close()


def test_a_seat_that_another_left_is_room_where_the_cluster_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a configured instance reserves stays reserved when that is removed: nothing was added any more."""
    monkeypatch.setattr("cluster.reservation.ray.available_resources", dict)
    reservations = Reservations()
    placement = PlacementConfig(num_gpus=1)
    assert reservations.has_room(PlacementConfig())
    assert not reservations.has_room(placement)
    reservations.take_over(Seats({"large/1": Seat(object(), Plan(), 0, placement, is_alone=False)}, [], []))
    assert not reservations.has_room(placement)
    reservations.vacate("large/1")
    assert reservations.has_room(placement)
    assert reservations.reuse("large/1", placement)
