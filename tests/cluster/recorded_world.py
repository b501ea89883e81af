"""A cell of scripted workers that keeps a record of what is decided, and what may happen to it."""

from __future__ import annotations

from pathlib import Path

from cluster.config import FlotillaConfig
from cluster.cost_model import DEFAULT_PROFILE, CostModel
from cluster.events import Cancelled, ClientLost, Tick
from cluster.recorded_core import make_core
from cluster.stream_messages import Objective
from cluster.succession import take_over
from tests.cluster.simulated import submit
from tests.cluster.test_core import World


def recorded_world(seed: int, policy: str, file: Path, micro_batches: int = 1, num_slots: int = 400) -> World:
    world = World(seed, policy, micro_batches, num_slots)
    record(world, policy, file)
    return world


def record(world: World, policy: str, file: Path) -> None:
    """Go on with another core, one that keeps a record."""
    raw = world.config.model_dump()
    raw["policy"]["name"] = policy
    raw["debug"] = {"decisions_file": file}
    core = make_core(FlotillaConfig.model_validate(raw), CostModel(DEFAULT_PROFILE))
    take_over(core, world.core, world.now)
    world.core = core


def live(world: World, events: int) -> None:
    """Random arrivals, answers in any order, cancellations, and losses of workers."""
    rng = world.rng
    for _ in range(events):
        number = len(world.submitted)
        match rng.choice(["answer"] * 6 + ["send"] * 3 + ["cancel", "tick", "lose", "client"]):
            case "send":
                objective = Objective(tpot_ms=5.0 if number % 2 else None)
                world.send(submit(number, rng, objective=objective), rng.choice("ab"))
            case "answer":
                world.answer_one()
            case "cancel" if number:
                world.handle(Cancelled(f"r{rng.randrange(number)}"))
            case "client":
                world.handle(ClientLost("b"))
            case "lose":
                name = rng.choice(["good", "poor", "verifier"])
                world.lose(name)
                world.start_target() if name == "verifier" else world.start_drafter(name)
            case "tick":
                world.now += 3.0
                world.handle(Tick())
        world.core.reflect()
    world.drain()
    world.core.reflect()
