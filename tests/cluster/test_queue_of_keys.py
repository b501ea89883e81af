"""How much of a cell's queue one API key may have, whatever it says of its requests."""

from __future__ import annotations

import msgspec

from cluster.stream_messages import Submit, Tenant
from deployments.pending_requests import Pending
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


def lost_before_its_first_token(asked: Submit) -> Submit:
    """What a front end sends to the next cell when the one that had taken the request is lost."""
    pending = Pending(asked, [])
    pending.next_life("one")
    pending.lost()
    again = pending.next_life("two")
    assert again is not None
    return again


def test_who_was_taken_once_is_not_held_to_its_part_of_the_queue_again() -> None:
    world = World(1, "autoregressive")
    for number in range(100):
        world.send(asked(world, number, "greedy"))
    assert world.rejected
    world.send(lost_before_its_first_token(asked(world, 200, "greedy")))
    assert "r200~2" in world.core.requests


def test_who_was_taken_once_and_finds_a_full_queue_makes_no_appointments() -> None:
    """Its front end asks again ten times a second, and each time took a time that was kept for others."""
    world = World(1, "autoregressive")
    for number in range(100):
        world.send(submit(number, world.rng))
    made = len(world.core.door.promises)
    for life in range(20):
        again = lost_before_its_first_token(submit(200, world.rng, prompt=[1] * 8))
        world.send(msgspec.structs.replace(again, request_id=f"r200~{life}"))
    assert world.rejected["r200~19"] == "queue_full"
    assert len(world.core.door.promises) == made
