"""A front end that leaves, and whose cells others have replaced that are none of its."""

from __future__ import annotations

import asyncio

import pytest

from cluster.members import Member, State
from deployments.cell_client import CellLost
from deployments.cell_clients import CellClients
from deployments.directory import ListedCells
from tests.fakes.cell_stand_in import eventually
from tests.fakes.listed_cells import DRAINING, Listed, connected, submission, tokens_of

OWN, OTHER = "own", "other"


def cell(target: str, state: State = "ready") -> Member:
    return Member(kind="cell", id=f"{target} {state}", node="n", state=state, details={"target": target})


async def lasting(listed: ListedCells, for_s: float = 0.4) -> bool:
    """Whether its cells are replaced once it has asked for some time."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while loop.time() - began < for_s:
        if listed.are_replaced:
            return True
        await asyncio.sleep(0.02)
    return False


@pytest.fixture(autouse=True)
def a_short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.directory.UNHEARD_S", 0.2)


@pytest.mark.parametrize("members", [[cell(OTHER)], [cell(OTHER, "starting"), cell(OWN, "draining")]])
async def test_cells_are_replaced_where_only_those_of_another_target_stay(members: list[Member]) -> None:
    assert await lasting(ListedCells(lambda: members, OWN, is_leaving=lambda: True), 10.0)


@pytest.mark.parametrize(
    "members",
    [
        [],
        [cell(OTHER, "draining"), cell(OWN, "draining")],
        [cell(OTHER), cell(OWN)],
        [cell(OTHER), cell(OWN, "starting")],
        [Member(kind="front_end", id="f", node="n")],
    ],
    ids=["nobody", "all go", "its own stays", "its own starts", "no cells"],
)
async def test_cells_are_not_replaced_where_one_may_come(members: list[Member]) -> None:
    assert not await lasting(ListedCells(lambda: members, OWN, is_leaving=lambda: True))


async def test_who_stays_waits_beside_cells_of_another_target() -> None:
    assert not await lasting(ListedCells(lambda: [cell(OTHER)], OWN))


async def test_a_directory_that_has_not_heard_of_all_ends_nothing() -> None:
    members = [cell(OTHER)]
    listed = ListedCells(lambda: members, OWN, is_leaving=lambda: True)
    assert not await lasting(listed, 0.1)
    members.append(cell(OWN))
    assert not listed.are_replaced
    members.pop()
    assert not await lasting(listed, 0.1)


async def test_requests_that_no_cell_will_take_end_at_once(listed: Listed) -> None:
    """They waited two minutes for a cell, beside front ends that served."""
    clients = CellClients(listed)
    clients.connect()
    going = listed.add("going")
    await connected(clients, 1)
    running = asyncio.create_task(tokens_of(clients, submission(60)))
    await eventually(lambda: len(going.submissions) == 1)
    listed.states["going"], going.reject = "draining", DRAINING
    waiting = asyncio.create_task(tokens_of(clients, submission(3)))
    await eventually(lambda: len(going.submissions) > 1)
    assert not waiting.done()
    listed.are_replaced = True
    with pytest.raises(CellLost, match="another configuration"):
        await asyncio.wait_for(waiting, 2)
    assert await running == list(range(60)), "its cell still had it"
    later = asyncio.create_task(tokens_of(clients, submission(3)))
    with pytest.raises(CellLost, match="another configuration"):
        await asyncio.wait_for(later, 2)
    await clients.close()
