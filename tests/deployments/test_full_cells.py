"""What full cells have to answer, and what is counted of it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from cluster.stream_messages import Rejected, Submit
from deployments.api_service import ApiService
from deployments.cell_clients import CellClients
from deployments.openai_api import create_app
from tests.fakes.cell_stand_in import CellStandIn, eventually
from tests.fakes.listed_cells import FULL, Listed, connected, submission, tokens_of
from tests.fakes.tiny_tokenizer import codec


async def test_a_refusal_counts_for_all_choices(
    http: httpx.AsyncClient, service: ApiService, cell: CellStandIn
) -> None:
    """Of ten requests with four choices each it were 21: those that cells had refused by then."""

    class Filling(list[Submit]):
        def append(self, submit: Submit) -> None:
            super().append(submit)
            cell.reject = FULL if len(self) > 2 else None

    cell.starved = True
    body: dict[str, Any] = {"prompt": ["a", "b"], "n": 2, "temperature": 1, "max_tokens": 4}
    for changes in ({}, {"stream": True}, {"service_tier": "fast"}):
        cell.submissions = Filling()
        assert (await http.post("/v1/completions", json=body | changes)).status_code == 429
    assert service.client.num_rejected == {("queue_full", "default"): 8, ("queue_full", "fast"): 4}


async def test_what_another_cell_took_was_not_refused(cell: CellStandIn, listed: Listed) -> None:
    one, two = listed.add("one"), listed.add("two")
    service = ApiService(cell, codec(), cells=listed)
    service.client.connect()
    await connected(service.client, 2)
    app = create_app(service)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://cell") as http:

        async def ask() -> int:
            return (await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 9})).status_code

        one.reject = FULL
        assert [await ask() for _ in range(4)] == [200] * 4
        assert not service.client.num_rejected
        two.reject = FULL
        assert await ask() == 429
        assert service.client.num_rejected == {("queue_full", "default"): 1}
        # And what the first cell tells for all is refused once.
        one.reject = two.reject = Rejected(request_id="", code="prompt_too_long", message="too long")
        assert await ask() == 400
    assert service.client.num_rejected == {("queue_full", "default"): 1, ("prompt_too_long", "default"): 1}
    await service.close()


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
