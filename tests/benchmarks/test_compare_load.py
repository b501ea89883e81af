"""Requests of a comparison over a real connection to a cell with scripted answers: every one of them ends."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from benchmarks.compare_load import CellLoad, sampling_seed
from benchmarks.load_client import Outcome
from benchmarks.objectives import Slo
from benchmarks.prompts import Prompt
from benchmarks.report import report
from benchmarks.workload import BenchRequest
from cluster.stream_messages import Objective, Rejected
from deployments.cell_client import CellClient
from tests.fakes.cell_stand_in import CellStandIn, eventually

END = 99


@pytest.fixture
async def cell() -> AsyncIterator[CellStandIn]:
    made = CellStandIn(lambda submit: [*submit.prompt, 7, 8, 9, END, 5])
    yield made
    await made.close()


@pytest.fixture
async def load(cell: CellStandIn) -> AsyncIterator[CellLoad]:
    client = CellClient(cell.endpoint, give_up_after_s=0.3)
    yield CellLoad(client, [END], temperature=0.5, timeout_s=0.4)
    await client.close()


def requests(count: int, gap_s: float | None = None) -> list[BenchRequest]:
    return [
        BenchRequest(
            n,
            Prompt("code", token_ids=(n, n + 1)),
            20,
            slo=Slo(tpot_ms=50.0, ttft_ms=200.0, e2e_ms=900.0),
            arrival_s=None if gap_s is None else n * gap_s,
        )
        for n in range(count)
    ]


async def test_requests_are_sent_when_due_with_their_objectives(load: CellLoad, cell: CellStandIn) -> None:
    done: list[Outcome] = []
    arrived: list[int] = []
    result = await load.run(requests(5, 0.03), on_done=done.append, on_tokens=arrived.append)
    assert result.duration_s >= 0.12
    assert len(done) == 5
    assert sum(arrived) == 30
    for n, outcome in enumerate(result.outcomes):
        assert outcome.is_ok
        assert outcome.token_ids == [n, n + 1, 7, 8, 9, END]
        assert outcome.finish_reason == "stop"
        assert outcome.sent_s >= 0.03 * n
        assert outcome.tpot_ms is not None
    submit = cell.submissions[2]
    # All that attainment is judged by: a policy cannot heed what it is not told.
    assert submit.objective == Objective(tpot_ms=50.0, ttft_ms=200.0, e2e_ms=900.0)
    assert submit.sampling.seed == sampling_seed([2, 3]) != sampling_seed([3, 2])
    assert len({submission.request_id for submission in cell.submissions}) == 5
    figures = report(result).total
    assert figures.attainment == 1.0
    assert figures.receipts is not None
    assert figures.receipts.num_accepted == 5 * 8


async def test_a_closed_loop_holds_to_its_bound(load: CellLoad, cell: CellStandIn) -> None:
    cell.pause_s = 0.01
    result = await load.run(requests(6), max_concurrency=2)
    ends = sorted(
        (outcome.sent_s, outcome.sent_s + (outcome.e2e_ms or 0) / 1e3) for outcome in result.outcomes
    )
    for start, _ in ends:
        assert sum(other <= start < end - 1e-3 for other, end in ends) <= 2


async def test_a_rejected_request_has_failed_and_says_why(load: CellLoad, cell: CellStandIn) -> None:
    cell.reject = Rejected(request_id="", code="queue_full", message="256 requests are already waiting")
    result = await load.run(requests(2))
    assert [outcome.error for outcome in result.outcomes] == [
        "queue_full: 256 requests are already waiting"
    ] * 2
    assert report(result).total.attainment == 0.0


async def test_a_request_that_does_not_end_has_failed_and_is_given_up(
    load: CellLoad, cell: CellStandIn
) -> None:
    cell.starved = True
    result = await load.run(requests(1))
    assert result.outcomes[0].error == "no end within 0.4 s"
    await eventually(lambda: len(cell.cancels) == 1)


async def test_a_request_that_ends_in_an_error_has_failed(load: CellLoad, cell: CellStandIn) -> None:
    cell.finish_reason = "error"
    result = await load.run(requests(1))
    assert result.outcomes[0].error == "ended as 'error'"
