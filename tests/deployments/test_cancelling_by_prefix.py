"""Requests ended by the beginning of their ids: in every cell, and between two of them."""

from __future__ import annotations

import asyncio

from deployments.cell_clients import CellClients
from tests.fakes.cell_stand_in import eventually
from tests.fakes.listed_cells import STARTING, Listed, connected, submission, tokens_of


async def test_cancelling_by_prefix_reaches_every_cell(clients: CellClients, listed: Listed) -> None:
    stand_ins = [listed.add("one"), listed.add("two")]
    await connected(clients, 2)
    for stand_in in stand_ins:
        stand_in.pause_s = 30.0
    tasks = [asyncio.create_task(tokens_of(clients, submission())) for _ in range(6)]
    await eventually(lambda: all(stand_in.submissions for stand_in in stand_ins))
    assert await clients.cancel_matching("nobody-") == 0
    assert await clients.cancel_matching("request-") == 6
    assert await asyncio.gather(*tasks) == [[]] * 6


async def test_a_request_between_two_cells_is_cancelled_by_prefix_too(
    clients: CellClients, listed: Listed
) -> None:
    """No cell had it: it went on although its cancelling was answered."""
    one = listed.add("one")
    await connected(clients, 1)
    one.starved = True
    task = asyncio.create_task(tokens_of(clients, submission()))
    await eventually(lambda: len(one.submissions) == 1)
    one.reject = STARTING
    one.hang_up()
    await eventually(lambda: len(one.submissions) >= 3)  # it is refused, again and again
    while next(iter(clients._pending.values())).cell:
        await asyncio.sleep(0.001)
    assert await clients.cancel_matching("request-") == 1
    assert await asyncio.wait_for(task, 1) == []


async def test_who_was_cancelled_by_prefix_is_not_begun_anew_where_its_cell_does_not_tell(
    clients: CellClients, listed: Listed
) -> None:
    one = listed.add("one")
    await connected(clients, 1)
    one.starved = True
    task = asyncio.create_task(tokens_of(clients, submission()))
    await eventually(lambda: len(one.submissions) == 1)
    one.stopped = True  # asked, it says nothing any more
    asked = asyncio.create_task(clients.cancel_matching("request-"))
    await asyncio.sleep(0)
    one.hang_up()
    one.stopped = False
    assert await asyncio.wait_for(task, 1) == []
    assert len(one.submissions) == 1
    asked.cancel()
