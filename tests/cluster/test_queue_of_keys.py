"""How much of a cell's queue one API key may have, whatever it says of its requests."""

from __future__ import annotations

import msgspec

from cluster.stream_messages import Submit, Tenant
from tests.cluster.simulated import submit
from tests.cluster.test_core import World


def asked(world: World, number: int, key: str, priority: int = 0) -> Submit:
    return msgspec.structs.replace(
        submit(number, world.rng, prompt=[1] * 8), tenant=Tenant(key), priority=priority
    )


def test_a_key_that_counts_its_priorities_down_leaves_places_to_others() -> None:
    """Each of its requests was held only against those that are as urgent: none at all."""
    world = World(1, "autoregressive")
    for number in range(100):
        world.send(asked(world, number, "greedy", priority=100 - number))
    most = world.config.scheduler.max_waiting
    assert len(world.core.waiting) <= most / 2
    world.send(asked(world, 200, "modest"))
    assert "r200" not in world.rejected
