"""The connection to the cell: many requests on it, losses of it, clients that go away."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from cluster.stream_messages import Rejected, Submit
from deployments.cell_client import CellClient, CellLost, RequestRejected
from engine.sampling_params import SamplingParams
from tests.fakes.cell_stand_in import CellStandIn, eventually

_ids = itertools.count()


def submission(length: int = 30, stop: tuple[int, ...] = ()) -> Submit:
    sampling = SamplingParams(max_tokens=length, stop_token_ids=stop)
    return Submit(request_id=f"request-{next(_ids)}", prompt=[1, 2], sampling=sampling)


@pytest.fixture
async def cell() -> AsyncIterator[CellStandIn]:
    made = CellStandIn(lambda submit: list(range(100)))
    yield made
    await made.close()


@pytest.fixture
async def client(cell: CellStandIn) -> AsyncIterator[CellClient]:
    made = CellClient(cell.endpoint, give_up_after_s=0.5)
    yield made
    await made.close()


async def tokens_of(client: CellClient, request: Submit) -> list[int]:
    tokens: list[int] = []
    async for event in client.submit(request):
        assert event.position == len(tokens)
        tokens += event.tokens
    return tokens


async def test_requests_share_one_connection(client: CellClient, cell: CellStandIn) -> None:
    lengths = range(1, 40)
    found = await asyncio.gather(*(tokens_of(client, submission(length)) for length in lengths))
    assert found == [list(range(length)) for length in lengths]
    assert len(cell._writers) == 1


async def test_a_connection_refuses_to_serve_a_second_event_loop(
    client: CellClient, cell: CellStandIn
) -> None:
    """Two loops on one queue of tokens: the second would see them only when it happens to wake."""
    assert await tokens_of(client, submission(3)) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="one event loop"):
        await asyncio.to_thread(asyncio.run, tokens_of(client, submission(3)))
    assert await tokens_of(client, submission(3)) == [0, 1, 2]


@pytest.mark.parametrize("repeat", [False, True])
async def test_losses_neither_lose_nor_repeat_tokens(
    client: CellClient, cell: CellStandIn, repeat: bool
) -> None:
    cell.repeat, cell.lose_after, cell.pause_s = repeat, [4, 9, 9, 25], 0.002
    found = await asyncio.gather(*(tokens_of(client, submission(30)) for _ in range(5)))
    assert found == [list(range(30))] * 5
    assert cell.lose_after == []
    again = [sent for sent in cell.submissions if sent.output]
    assert again
    assert all(sent.prompt == [1, 2] and sent.output == list(range(len(sent.output))) for sent in again)
    # Every life has its own id, so that a cell that still holds the last one does not refuse it.
    assert len({sent.request_id for sent in cell.submissions}) == len(cell.submissions)


async def test_lost_news_of_the_end_is_not_asked_for_again(client: CellClient, cell: CellStandIn) -> None:
    request = submission(30, stop=(7,))
    events = client.submit(request)
    cell.finish_reason = None
    first = await anext(events)
    # All tokens arrived, their finish reason did not.
    client._pending[request.request_id].output[:] = list(range(8))
    cell.hang_up()
    while first.finish_reason is None:
        first = await anext(events)
    assert first.finish_reason == "stop"


async def test_closing_early_cancels(client: CellClient, cell: CellStandIn) -> None:
    cell.pause_s = 0.01
    request = submission()
    async with aclosing(client.submit(request)) as events:
        await anext(events)
    await eventually(lambda: cell.cancels == [request.request_id])
    assert client._pending == {}


async def test_cancelled_task_cancels(client: CellClient, cell: CellStandIn) -> None:
    cell.starved = True
    request = submission()
    task = asyncio.create_task(tokens_of(client, request))
    await eventually(lambda: len(cell.submissions) == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: cell.cancels == [request.request_id])


async def test_finished_request_is_not_cancelled(client: CellClient, cell: CellStandIn) -> None:
    assert len(await tokens_of(client, submission(5))) == 5
    await tokens_of(client, submission(5))
    assert cell.cancels == []


async def test_request_waits_for_a_cell_that_is_away(client: CellClient, cell: CellStandIn) -> None:
    cell.away = True
    task = asyncio.create_task(tokens_of(client, submission(6)))
    await asyncio.sleep(0.1)
    cell.away = False
    assert await task == list(range(6))


async def test_cell_that_stays_away_is_lost_and_can_return(client: CellClient, cell: CellStandIn) -> None:
    cell.away = True
    with pytest.raises(CellLost, match="did not come back"):
        await tokens_of(client, submission())
    cell.away = False
    assert await tokens_of(client, submission(4)) == [0, 1, 2, 3]


async def test_cell_that_goes_mid_answer_is_lost(client: CellClient, cell: CellStandIn) -> None:
    cell.pause_s = 0.01
    events = client.submit(submission())
    await anext(events)
    cell.away = True
    cell.hang_up()
    with pytest.raises(CellLost):
        async for _ in events:
            pass


async def test_rejection_is_raised(client: CellClient, cell: CellStandIn) -> None:
    cell.reject = Rejected(request_id="", code="queue_full", message="full", retry_after_s=2.0)
    with pytest.raises(RequestRejected) as caught:
        await tokens_of(client, submission())
    assert caught.value.rejected.retry_after_s == 2.0


async def test_resubmission_is_patient_with_a_cell_that_starts(client: CellClient, cell: CellStandIn) -> None:
    cell.pause_s = 0.01
    request = submission()
    events = client.submit(request)
    tokens = (await anext(events)).tokens
    cell.reject = Rejected(request_id="", code="not_ready", message="starting")
    cell.hang_up()
    await eventually(lambda: len(cell.submissions) >= 3)
    cell.reject = None
    async for event in events:
        tokens += event.tokens
    assert tokens == list(range(30))


async def test_resubmission_does_not_wait_for_ever(client: CellClient, cell: CellStandIn) -> None:
    cell.pause_s = 0.01
    events = client.submit(submission())
    await anext(events)
    cell.reject = Rejected(request_id="", code="not_ready", message="starting")
    cell.hang_up()
    with pytest.raises(RequestRejected, match="starting"):
        async for _ in events:
            pass


async def test_close_ends_waiting_requests(client: CellClient, cell: CellStandIn) -> None:
    cell.starved = True
    task = asyncio.create_task(tokens_of(client, submission()))
    await eventually(lambda: len(cell.submissions) == 1)
    await client.close()
    with pytest.raises(CellLost, match="shutting down"):
        await task
