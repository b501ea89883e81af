"""A cell whose target does not come back, beside one that serves."""

from __future__ import annotations

import asyncio

import pytest

from deployments.cell_clients import CellClients
from tests.fakes.cell_stand_in import CellStandIn, eventually
from tests.fakes.listed_cells import Listed, connected, submission, tokens_of


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.moving_requests._AWAY_S", 0.3)
    monkeypatch.setattr("deployments.cell_clients._RELIEVE_PAUSE_S", 0.05)


@pytest.fixture
async def clients(listed: Listed) -> CellClients:
    made = CellClients(listed)
    made.connect()
    return made


async def waiting_at(
    clients: CellClients, listed: Listed, name: str
) -> tuple[CellStandIn, asyncio.Task[list[int]]]:
    """A cell that answers nothing, and a request that is there."""
    cell = listed.add(name)
    cell.starved = True
    await eventually(lambda: name in clients._connections and clients._connections[name].is_open)
    task = asyncio.create_task(tokens_of(clients, submission(3)))
    await eventually(lambda: len(cell.submissions) == 1)
    return cell, task


async def test_who_has_not_begun_goes_to_a_cell_that_serves(clients: CellClients, listed: Listed) -> None:
    """It stayed for ever, as long as its client did."""
    one, task = await waiting_at(clients, listed, "one")
    listed.add("two")
    await connected(clients, 2)
    listed.states["one"] = "starting"
    assert await asyncio.wait_for(task, 5) == [0, 1, 2]
    assert one.cancels == one.moved != []
    await clients.close()


async def test_a_target_that_is_soon_back_keeps_its_requests(clients: CellClients, listed: Listed) -> None:
    one, task = await waiting_at(clients, listed, "one")
    two = listed.add("two")
    await connected(clients, 2)
    for _ in range(3):
        listed.states["one"] = "starting"
        await asyncio.sleep(0.15)
        listed.states["one"] = "ready"
        await asyncio.sleep(0.05)
    assert not two.submissions
    assert not one.moved
    task.cancel()
    await clients.close()


async def test_where_nobody_serves_it_stays(clients: CellClients, listed: Listed) -> None:
    one, task = await waiting_at(clients, listed, "one")
    listed.add("two")
    listed.states |= {"one": "starting", "two": "starting"}
    await connected(clients, 2)
    await asyncio.sleep(0.6)
    assert not one.moved
    assert not task.done()
    task.cancel()
    await clients.close()


async def test_who_fled_once_stays_where_it_is(clients: CellClients, listed: Listed) -> None:
    """It may be what ends targets."""
    _, task = await waiting_at(clients, listed, "one")
    two, three = listed.add("two"), listed.add("three")
    two.starved = three.starved = True
    await connected(clients, 3)
    listed.states["one"] = "starting"
    await eventually(lambda: len(two.submissions) + len(three.submissions) == 1)
    listed.states["two" if two.submissions else "three"] = "starting"
    await asyncio.sleep(0.6)
    assert len(two.submissions) + len(three.submissions) == 1
    task.cancel()
    await clients.close()


async def test_who_has_begun_goes_on_there(clients: CellClients, listed: Listed) -> None:
    """It waited until the target was back, for as long as its client did."""
    one = listed.add("one")
    one.pause_s = 0.01
    await connected(clients, 1)
    task = asyncio.create_task(tokens_of(clients, submission(60)))
    pending = clients._pending
    await eventually(lambda: any(request.output for request in pending.values()))
    one.stopped = True
    two = listed.add("two")
    await connected(clients, 2)
    listed.states["one"] = "starting"
    assert await asyncio.wait_for(task, 5) == list(range(60))
    assert one.moved
    assert two.submissions[0].output == list(range(len(two.submissions[0].output)))
    assert two.submissions[0].output
    await clients.close()
