"""Placement on a Ray cluster of several nodes, started on this machine, and the loss of one of them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.cell import Cell
from cluster.config import FlotillaConfig
from cluster.placement import rank_name
from cluster.process_environment import take_on
from cluster.stream_messages import Speculation, Submit
from deployments.cell_client import CellClient
from deployments.demo import demo_config
from engine.sampling_params import SamplingParams
from tests.system.conftest import pass_self_tests, with_profile
from tests.system.replicas_on_nodes import OF_GROUP, check_replicas

pytestmark = [pytest.mark.system, pytest.mark.thorough]

# So that a dead node is noticed in about a second, not in Ray's usual fifteen.
QUICK_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 2,
}
NODE: dict[str, Any] = {"object_store_memory": 100 << 20, "include_dashboard": False}
# Repeats itself, so that prompt lookup has something to draft.
PROMPT = [40, 41, 42, 43, 44, 45] * 6


def two_zones() -> FlotillaConfig:
    """A target on nodes for it, a drafter that may be on any drafter node, and one that must be in zone a."""
    lookup = {"kind": "prompt_lookup", "max_requests": 16}
    raw = demo_config().model_dump() | {
        "drafters": [
            lookup | {"name": "anywhere", "placement": {"labels": {"role": "drafter"}}},
            lookup | {"name": "pinned", "placement": {"labels": {"role": "drafter", "zone": "a"}}},
        ]
    }
    raw["target"]["placement"]["labels"] = {"role": "target"}
    raw["policy"]["name"], raw["selector"]["name"] = "fixed", "fixed"
    return FlotillaConfig.model_validate(raw)


class Machines:
    """The nodes, by the name given to them."""

    def __init__(self) -> None:
        self._cluster = Cluster()
        self._nodes: dict[str, Any] = {}

    def add(self, name: str, num_cpus: int, resources: dict[str, float] | None = None, **labels: str) -> None:
        system = {"_system_config": QUICK_HEALTH_CHECKS} if not self._nodes else {}
        self._nodes[name] = self._cluster.add_node(
            num_cpus=num_cpus, resources=resources, labels=labels | {"machine": name}, **NODE, **system
        )

    def kill(self, name: str) -> None:
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def id_of(self, name: str) -> str:
        return next(
            str(node["NodeID"])
            for node in ray.nodes()
            if node["Alive"] and (node.get("Labels") or {}).get("machine") == name
        )

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def machines(own_ray: None) -> Iterator[Machines]:
    root = str(Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    take_on()
    made = Machines()
    made.add("head", 0)
    made.add("engine", 2, role="target")
    made.add("first", 1, role="drafter", zone="a")
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.close()


@pytest.fixture(scope="module")
def cell(machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    at_head = NodeAffinitySchedulingStrategy(machines.id_of("head"), soft=False)
    actor: Any = ray.remote(Cell)
    config = with_profile(two_zones(), tmp_path_factory.mktemp("nodes") / "costs.json")
    pass_self_tests(config)
    made = actor.options(num_cpus=0, max_restarts=0, scheduling_strategy=at_head).remote(config)
    deadline = time.monotonic() + 90
    while not (state := ray.get(made.describe.remote(), timeout=30))["ready"]:
        assert not state["failure"], state
        assert time.monotonic() < deadline, state
        time.sleep(0.2)
    yield made
    ray.kill(made)


async def drafters(cell: Any) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in await cell.drafters.remote()}


async def eventually(cell: Any, name: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The drafter's state, once the condition holds for it."""
    deadline = time.monotonic() + 25
    while not condition(found := (await drafters(cell))[name]):
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.1)
    return found


@asynccontextmanager
async def client(cell: Any) -> AsyncIterator[CellClient]:
    async def locate() -> tuple[str, int, str]:
        host, port, token = await cell.endpoint.remote()
        return host, port, token

    made = CellClient(locate)
    yield made
    await made.close()


async def ask(
    connection: CellClient, name: str, drafter: str | None = None, max_tokens: int = 48
) -> tuple[list[int], set[str]]:
    """The tokens of a greedy request, and the drafters that served it."""
    tokens: list[int] = []
    served: set[str] = set()
    request = Submit(
        request_id=name,
        prompt=PROMPT,
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        speculation=Speculation(drafters=(drafter,) if drafter else ()),
    )
    async for event in connection.submit(request):
        tokens += event.tokens
        if event.receipt is not None:
            served = set(event.receipt.drafters)
    return tokens, served


async def test_workers_land_where_their_labels_say_and_serve(machines: Machines, cell: Any) -> None:
    there = await drafters(cell)
    assert {one["node"] for one in there.values()} == {machines.id_of("first")}
    async with client(cell) as connection:
        for name in there:
            tokens, served = await ask(connection, f"on {name}", name)
            assert len(tokens) == 48
            assert served == {name}


async def test_a_drafter_added_for_a_node_of_its_own_gets_one(machines: Machines, cell: Any) -> None:
    machines.add("second", 1, role="drafter", zone="b")
    placement = {"collocate": "own-node", "labels": {"role": "drafter"}}
    alone = {"kind": "prompt_lookup", "name": "alone", "placement": placement}
    (added,) = await cell.add_drafter.remote(alone)
    assert added["state"] == "ready", added
    assert added["node"] == machines.id_of("second")
    beside = {"kind": "prompt_lookup", "name": "beside", "placement": {"collocate": "target"}}
    (added,) = await cell.add_drafter.remote(beside)
    assert added["node"] == machines.id_of("engine")
    await cell.remove_drafter.remote("alone")
    await cell.remove_drafter.remote("beside")


async def test_a_lost_node_costs_no_request_and_its_drafters_come_back_where_they_may(
    machines: Machines, cell: Any
) -> None:
    async with client(cell) as connection:
        undisturbed, _ = await ask(connection, "undisturbed")
        stop, answers = asyncio.Event(), []

        async def load(number: int) -> None:
            count = 0
            while not stop.is_set():
                tokens, _ = await ask(connection, f"load {number} {count}")
                answers.append(tokens)
                count += 1

        running = [asyncio.create_task(load(number)) for number in range(4)]
        await asyncio.sleep(0.5)
        await asyncio.to_thread(machines.kill, "first")
        moved = await eventually(
            cell, "anywhere", lambda one: one["state"] == "ready" and one["restarts"] > 0
        )
        assert moved["node"] == machines.id_of("second")
        print(f"a drafter whose node died was ready elsewhere after {moved['recovery_s']:.1f} s")
        waiting = await eventually(cell, "pinned", lambda one: bool(one["waits_for"]))
        assert waiting["state"] == "restarting"
        assert "zone=a" in waiting["waits_for"]
        assert (await ask(connection, "drafted elsewhere", "anywhere"))[1] == {"anywhere"}
        stop.set()
        await asyncio.wait_for(asyncio.gather(*running), 30)
    assert answers
    assert all(tokens == undisturbed for tokens in answers)


async def test_when_such_a_node_is_there_again_so_is_the_drafter(machines: Machines, cell: Any) -> None:
    machines.add("third", 1, role="drafter", zone="a")
    back = await eventually(cell, "pinned", lambda one: one["state"] == "ready")
    assert back["node"] == machines.id_of("third")
    assert not back["waits_for"]


async def test_the_targets_node_is_lost_and_another_takes_over_where_requests_stopped(
    machines: Machines, cell: Any
) -> None:
    """Last: what was collocated with the target is elsewhere then."""
    async with client(cell) as connection:
        undisturbed, _ = await ask(connection, "before", max_tokens=400)
        stop, answers = asyncio.Event(), []

        async def load(number: int) -> None:
            count = 0
            while not stop.is_set():
                tokens, _ = await ask(connection, f"across {number} {count}", max_tokens=400)
                answers.append(tokens)
                count += 1

        # One after the other, so that each has one under way whenever the node is gone.
        running = [asyncio.create_task(load(number)) for number in range(4)]
        await asyncio.sleep(0.3)
        begun = time.monotonic()
        await asyncio.to_thread(machines.kill, "engine")
        await target(cell, lambda one: one["state"] == "lost")
        noticed = time.monotonic()
        await asyncio.sleep(0.1)  # what had been answered by then has arrived
        num_answers = len(answers)
        await asyncio.sleep(0.2)
        assert len(answers) == num_answers, "answered without a target"
        assert not any(one.done() for one in running)
        machines.add("other engine", 2, role="target")  # Ray does this in the main thread only
        back = await target(cell, lambda one: one["state"] in ("ready", "busy"))
        assert back["node"] == machines.id_of("other engine")
        stop.set()
        await asyncio.wait_for(asyncio.gather(*running), 60)
    assert len(answers) >= 4
    assert all(tokens == undisturbed for tokens in answers)
    print(f"the target's node was missed after {noticed - begun:.1f} s")
    print(f"the target was ready on another {back['recovery_s']:.1f} s after that")


async def target(cell: Any, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The state of the target's rank, once the condition holds for it."""
    deadline = time.monotonic() + 60
    while True:
        found = next(one for one in await cell.workers.remote() if one["process"] == rank_name(0))
        if condition(found):
            return dict(found)
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.1)


def test_replicas_keep_off_the_head_and_those_that_do_not_fit_ask_for_a_node(machines: Machines) -> None:
    machines.add("worker", 1, OF_GROUP)
    check_replicas(machines.address)
