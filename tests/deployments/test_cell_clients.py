"""Several cells behind one front end: losses, drains, refusals; every token once, every request answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from cluster.stream_messages import Rejected, TokenEvent
from deployments import cell_clients
from deployments.cell_clients import CellClients
from deployments.pending_requests import CellLost, RequestRejected
from tests.fakes.cell_stand_in import eventually
from tests.fakes.listed_cells import (
    DRAINING,
    FULL,
    INFEASIBLE,
    STARTING,
    Listed,
    connected,
    submission,
    tokens_of,
)


async def collected(events: AsyncIterator[TokenEvent]) -> list[TokenEvent]:
    return [event async for event in events]


async def test_requests_of_a_lost_cell_go_on_at_another(clients: CellClients, listed: Listed) -> None:
    one, two = listed.add("one"), listed.add("two")
    await connected(clients, 2)
    tasks = [asyncio.create_task(tokens_of(clients, submission())) for _ in range(12)]
    await eventually(lambda: len(one.submissions) > 2 and len(two.submissions) > 2)
    await asyncio.sleep(0.02)
    await listed.kill("one")
    assert await asyncio.gather(*tasks) == [list(range(60))] * 12
    moved = [sent for sent in two.submissions if sent.output]
    assert moved, "nobody was moved in the midst of an answer"
    assert all(sent.output == list(range(len(sent.output))) for sent in moved)


async def test_a_cell_that_gives_requests_back_gets_none_any_more(
    clients: CellClients, listed: Listed
) -> None:
    one, two = listed.add("one"), listed.add("two")
    await connected(clients, 2)
    one.reject = DRAINING
    listed.states["one"] = "draining"
    found = await asyncio.gather(*(tokens_of(clients, submission(9)) for _ in range(8)))
    assert found == [list(range(9))] * 8
    await asyncio.sleep(0.05)
    refused = len(one.submissions)
    assert await tokens_of(clients, submission(9)) == list(range(9))
    assert len(one.submissions) == refused
    assert len(two.submissions) >= 9


async def test_what_a_lone_cell_gives_back_waits_for_another(clients: CellClients, listed: Listed) -> None:
    one = listed.add("one")
    await connected(clients, 1)
    one.reject = DRAINING
    task = asyncio.create_task(tokens_of(clients, submission(9)))
    await eventually(lambda: len(one.submissions) > 1)
    listed.add("two")
    assert await task == list(range(9))
    assert clients.num_streams == 0


async def test_a_refusal_is_passed_on_only_after_all_have_refused(
    clients: CellClients, listed: Listed
) -> None:
    one, two = listed.add("one"), listed.add("two")
    await connected(clients, 2)
    one.reject = FULL
    found = await asyncio.gather(*(tokens_of(clients, submission(9)) for _ in range(6)))
    assert found == [list(range(9))] * 6
    assert clients.num_resubmitted == 0, "no cell was lost: one refused what the other took"
    two.reject = FULL
    before = len(one.submissions) + len(two.submissions)
    with pytest.raises(RequestRejected, match="full"):
        await tokens_of(clients, submission(9))
    assert len(one.submissions) + len(two.submissions) == before + 2


async def test_what_is_wrong_with_a_request_is_told_by_the_first_cell(
    clients: CellClients, listed: Listed
) -> None:
    stand_ins = [listed.add("one"), listed.add("two")]
    await connected(clients, 2)
    for stand_in in stand_ins:
        stand_in.reject = Rejected(request_id="", code="prompt_too_long", message="too long")
    with pytest.raises(RequestRejected, match="too long"):
        await tokens_of(clients, submission(9))
    assert sum(len(stand_in.submissions) for stand_in in stand_ins) == 1


async def test_a_cell_that_starts_is_spared_while_others_serve(clients: CellClients, listed: Listed) -> None:
    one, two = listed.add("one"), listed.add("two")
    listed.states["two"] = "starting"
    await connected(clients, 2)
    await asyncio.gather(*(tokens_of(clients, submission(3)) for _ in range(6)))
    assert (len(one.submissions), len(two.submissions)) == (6, 0)
    listed.states["two"] = "ready"
    await asyncio.sleep(0.05)
    await asyncio.gather(*(tokens_of(clients, submission(3)) for _ in range(12)))
    assert two.submissions


async def test_who_finds_only_starting_cells_waits_for_one_that_serves(
    clients: CellClients, listed: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a rollout: the new directory has heard of the cell that starts before those that serve."""
    one = listed.add("one")
    one.reject, listed.states["one"] = STARTING, "starting"
    await connected(clients, 1)
    task = asyncio.create_task(tokens_of(clients, submission(9)))
    await eventually(lambda: len(one.submissions) > 1)
    assert not task.done()
    listed.add("two")
    assert await task == list(range(9))

    await listed.kill("two")
    await connected(clients, 1)
    monkeypatch.setattr(cell_clients, "_UNHEARD_S", 0.3)
    with pytest.raises(RequestRejected, match="starting"):
        await tokens_of(clients, submission(9))
    listed.states["one"] = "ready"  # its target was lost
    await eventually(lambda: clients.can_serve)
    before = len(one.submissions)
    with pytest.raises(RequestRejected, match="starting"):
        await tokens_of(clients, submission(9))
    assert len(one.submissions) == before + 1


async def test_of_several_refusals_the_one_that_ends_first_is_told(
    clients: CellClients, listed: Listed
) -> None:
    one, two = listed.add("one"), listed.add("two")
    await connected(clients, 2)
    for first_s, second_s in ((2.0, 60.0), (60.0, 2.0)):
        for cell, retry_after_s in ((one, first_s), (two, second_s)):
            cell.reject = msgspec.structs.replace(FULL, retry_after_s=retry_after_s)
        for _ in range(4):  # either cell is asked first
            with pytest.raises(RequestRejected) as refused:
                await tokens_of(clients, submission(9))
            assert refused.value.rejected.retry_after_s == 2.0


async def test_a_full_cell_is_asked_once_also_while_another_starts_or_goes(
    clients: CellClients, listed: Listed
) -> None:
    """As in an overload that more cells are to end: it makes an appointment each time that it is asked."""
    one, two = listed.add("one"), listed.add("two")
    await connected(clients, 2)
    one.reject = FULL
    for state, rejection in (("starting", STARTING), ("draining", DRAINING)):
        two.reject, listed.states["two"] = rejection, state
        await eventually(lambda state=state: clients._connections["two"].member.state == state)
        before = len(one.submissions)
        with pytest.raises(RequestRejected, match="full") as refused:
            await tokens_of(clients, submission(9))
        assert refused.value.rejected.retry_after_s == 2.0
        assert len(one.submissions) == before + 1


async def test_requests_that_follow_each_other_stay_with_the_prompt_they_share(
    clients: CellClients, listed: Listed
) -> None:
    """What was sent lately counted as if the cell had all of it to read, also what it had read before."""
    stand_ins = [listed.add(name) for name in ("one", "two", "three")]
    listed.prefill_s_per_token = 1e-3
    await connected(clients, 3)
    shared = list(range(640))
    for number in range(8):
        request = msgspec.structs.replace(submission(1), prompt=[*shared, number])
        assert await tokens_of(clients, request) == [0]
        if number == 0:  # till its report counts what the first request has it read
            await asyncio.sleep(0.6)
    assert sorted(len(stand_in.submissions) for stand_in in stand_ins) == [0, 0, 8]


async def test_a_cell_that_is_added_relieves_the_queues_of_others(
    clients: CellClients, listed: Listed
) -> None:
    one = listed.add("one")
    await connected(clients, 1)
    one.starved, listed.queues["one"] = True, 4.0
    asked = [msgspec.structs.replace(submission(9), on_miss="reject") for _ in range(20)]
    tasks = [asyncio.create_task(tokens_of(clients, request)) for request in asked]
    await eventually(lambda: len(one.submissions) == 20)
    two = listed.add("two")
    await eventually(lambda: len(two.submissions) == 10)
    # The first cell has taken them: the second may not refuse them for their objectives.
    assert {sent.on_miss for sent in two.submissions} == {"serve"}
    assert [sent.request_id.partition("~")[0] for sent in two.submissions] == [
        sent.request_id for sent in reversed(one.submissions[10:])
    ]
    await eventually(lambda: set(one.cancels) == {sent.request_id for sent in one.submissions[10:]})
    assert await asyncio.gather(*tasks[10:]) == [list(range(9))] * 10
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    # The others' clients have given up: the cell can tell.
    await eventually(lambda: len(one.cancels) == 20)
    assert set(one.moved) == {sent.request_id for sent in one.submissions[10:]}


async def test_a_backlog_is_shared_out_and_who_is_not_in_the_background_stays(
    clients: CellClients, listed: Listed
) -> None:
    one = listed.add("one")
    await connected(clients, 1)
    one.starved, listed.backlogs["one"] = True, 4.0
    asked = [msgspec.structs.replace(submission(9), priority=number % 2) for number in range(20)]
    tasks = [asyncio.create_task(tokens_of(clients, request)) for request in asked]
    await eventually(lambda: len(one.submissions) == 20)
    two = listed.add("two")
    await eventually(lambda: len(two.submissions) == 5)
    await asyncio.gather(*tasks[11::2])
    assert {sent.priority for sent in two.submissions} == {1}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_who_was_taken_is_not_turned_away_for_what_another_cell_learnt_of_its_speed(
    clients: CellClients, listed: Listed
) -> None:
    one = listed.add("one")
    await connected(clients, 1)
    task = asyncio.create_task(tokens_of(clients, submission()))
    await eventually(lambda: len(one.submissions) == 1)
    await asyncio.sleep(0.02)
    two = listed.add("two")
    two.reject = INFEASIBLE
    await connected(clients, 2)
    await listed.kill("one")
    await eventually(lambda: len(two.submissions) >= 1)
    two.reject = None
    assert await task == list(range(60))
    two.reject = INFEASIBLE
    with pytest.raises(RequestRejected, match="below the least"):
        await tokens_of(clients, submission())


async def test_a_cell_of_which_nothing_is_heard_is_left_if_there_are_others(
    clients: CellClients, listed: Listed
) -> None:
    one = listed.add("one")
    await connected(clients, 1)
    one.starved = True
    task = asyncio.create_task(tokens_of(clients, submission(9)))
    await eventually(lambda: len(one.submissions) == 1)
    listed.add("two")
    await connected(clients, 2)
    hung = listed.stand_ins.pop("one")
    assert await asyncio.wait_for(task, 3) == list(range(9))
    await hung.close()


async def test_a_directory_that_forgot_all_cells_breaks_no_connection(
    clients: CellClients, listed: Listed
) -> None:
    listed.add("one").pause_s = 0.02
    await connected(clients, 1)
    task = asyncio.create_task(tokens_of(clients, submission()))
    known, listed.stand_ins = listed.stand_ins, {}
    await asyncio.sleep(0.2)
    assert await tokens_of(clients, submission(9)) == list(range(9))
    listed.stand_ins = known
    assert await task == list(range(60))
    assert clients.num_resubmitted == 0


async def test_no_cell_at_all_ends_in_time(clients: CellClients) -> None:
    with pytest.raises(CellLost, match="did not come back"):
        await tokens_of(clients, submission())


async def test_who_was_given_up_is_no_work_for_a_cell_that_comes_later(
    clients: CellClients, listed: Listed
) -> None:
    """Its client had not read yet that it was, so a cell was sent it, and generated all of it for nobody."""
    listed.add("one")
    await connected(clients, 1)
    events = clients.submit(submission())
    await anext(events)  # and reads no further
    await listed.kill("one")
    await eventually(lambda: clients._task is not None and clients._task.done())
    two = listed.add("two")
    assert await tokens_of(clients, submission(3)) == [0, 1, 2]
    assert len(two.submissions) == 1
    with pytest.raises(CellLost):
        await collected(events)
    assert clients.num_streams == 0


async def test_a_cell_that_skipped_tokens_is_told_to_stop(clients: CellClients, listed: Listed) -> None:
    """The request ends with an error, and the cell went on with it to its end."""
    one = listed.add("one")
    await connected(clients, 1)
    request = submission()
    events = clients.submit(request)
    await anext(events)
    clients._pending[request.request_id].output.pop()
    with pytest.raises(CellLost, match="never arrived"):
        await collected(events)
    await eventually(lambda: one.cancels == [request.request_id])


async def test_a_stopped_cell_is_left_and_says_nothing_twice_when_it_goes_on(
    clients: CellClients, listed: Listed
) -> None:
    one, two = listed.add("one"), listed.add("two")
    await connected(clients, 2)
    tasks = [asyncio.create_task(tokens_of(clients, submission(100))) for _ in range(12)]
    await eventually(lambda: len(one.submissions) > 2 and len(two.submissions) > 2)
    await asyncio.sleep(0.03)
    one.stopped = True  # its port still accepts connections, and the directory still names it
    await eventually(lambda: clients.num_silent == 1)
    assert not clients._connections["one"].is_open if "one" in clients._connections else True
    one.stopped = False  # with the former lives of requests still running there
    # `tokens_of` asserts that no position comes twice or is left out.
    assert await asyncio.gather(*tasks) == [list(range(100))] * 12
    moved = [sent for sent in two.submissions if sent.output]
    assert moved, "nobody was moved in the midst of an answer"
    await connected(clients, 2)
    assert await tokens_of(clients, submission(9)) == list(range(9))


async def test_a_stopped_cell_that_is_alone_serves_again_when_it_goes_on(
    clients: CellClients, listed: Listed
) -> None:
    one = listed.add("one")
    await connected(clients, 1)
    task = asyncio.create_task(tokens_of(clients, submission(100)))
    await eventually(lambda: len(one.submissions) == 1)
    one.stopped = True
    await eventually(lambda: clients.num_silent == 1)
    assert not clients.is_connected
    assert not task.done()
    one.stopped = False
    assert await task == list(range(100))
    assert one.submissions[1].request_id != one.submissions[0].request_id


async def test_a_cell_with_nothing_to_say_is_not_left(clients: CellClients, listed: Listed) -> None:
    listed.add("one")
    await connected(clients, 1)
    await asyncio.sleep(0.4)  # four times what a silent cell is given
    assert clients.num_silent == 0
    assert clients.is_connected


async def test_an_event_loop_that_does_not_turn_is_told(clients: CellClients, listed: Listed) -> None:
    listed.add("one")
    await connected(clients, 1)
    clients.check(stuck_s=0.0)
    clients._turned_at -= 60
    with pytest.raises(RuntimeError, match="has not turned for 6"):
        clients.check(stuck_s=20.0)
    await asyncio.sleep(0.05)
    clients.check(stuck_s=20.0)


async def test_who_is_connected_to_a_cell_that_takes_requests_can_serve(
    clients: CellClients, listed: Listed
) -> None:
    assert not clients.can_serve
    one = listed.add("one")
    listed.states["one"] = "starting"
    await connected(clients, 1)
    assert not clients.can_serve
    listed.states["one"] = "ready"
    await eventually(lambda: clients.can_serve)
    one.stopped = True
    await eventually(lambda: not clients.can_serve)
