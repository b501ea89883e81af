"""What a full cell has to answer when it is the only one that is left."""

from __future__ import annotations

import asyncio

from deployments.cell_clients import CellClients
from tests.fakes.cell_stand_in import eventually
from tests.fakes.listed_cells import FULL, Listed, connected, submission, tokens_of


async def test_all_that_a_lost_cell_had_do_not_ask_a_full_one_again_and_again(listed: Listed) -> None:
    """Each asked ten times a second: to refuse hundreds took the cell that was left all of its time."""
    clients = CellClients(listed)
    clients.connect()
    one, two = listed.add("one"), listed.add("two")
    one.starved, listed.states["two"], two.reject = True, "starting", FULL
    await connected(clients, 2)
    tasks = [asyncio.create_task(tokens_of(clients, submission(3))) for _ in range(150)]
    await eventually(lambda: len(one.submissions) == 150)
    await listed.kill("one")
    await eventually(lambda: len(two.submissions) >= 150)
    await asyncio.sleep(0.5)
    loop = asyncio.get_running_loop()
    began, before = loop.time(), len(two.submissions)
    await asyncio.sleep(1.5)
    assert 0 < len(two.submissions) - before < 100 * (loop.time() - began)
    two.reject = None
    listed.states["two"] = "ready"  # no need to wait until they ask
    began = loop.time()
    assert await asyncio.gather(*tasks) == [[0, 1, 2]] * 150
    assert loop.time() - began < 2, "they were sent there only when it was their turn"
    await clients.close()
