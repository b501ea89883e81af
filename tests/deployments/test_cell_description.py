"""What a front end knows of cells: learnt once for all who ask, and before the first request."""

from __future__ import annotations

import asyncio

import pytest
from httpx import AsyncClient

from deployments.api_service import ApiService
from deployments.errors import ApiError
from deployments.grpc_service import GenerationService
from tests.fakes.cell_stand_in import CellStandIn


async def test_requests_may_wait_for_a_target_that_is_being_replaced(
    cell: CellStandIn, service: ApiService
) -> None:
    """Also at a front end that is new: its cell has served, and says what."""
    cell.ready, cell.stage = False, "ready"
    assert (await service.info()).model == "demo"
    with pytest.raises(ApiError, match="still loading"):
        await service.ready()


async def test_requests_are_refused_while_the_first_model_is_loaded(
    cell: CellStandIn, service: ApiService
) -> None:
    cell.ready, cell.stage = False, "loading the target"
    for _ in range(2):
        with pytest.raises(ApiError, match="still loading") as refused:
            await service.info()
    assert refused.value.status == 503
    cell.ready, cell.stage = True, "ready"
    assert (await service.info()).ready


async def test_all_who_wait_ask_once(cell: CellStandIn, service: ApiService) -> None:
    cell.away = True
    answers = await asyncio.gather(*(service.info() for _ in range(50)), return_exceptions=True)
    assert all(isinstance(answer, ApiError) for answer in answers)
    assert cell.num_described == 1
    cell.away = False
    assert {one.model for one in await asyncio.gather(*(service.info() for _ in range(50)))} == {"demo"}
    assert cell.num_described == 2


async def test_one_who_leaves_takes_nobody_elses_answer_along(cell: CellStandIn, service: ApiService) -> None:
    leaving = asyncio.create_task(service.info())
    staying = asyncio.create_task(service.info())
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await staying).model == "demo"


async def test_what_cells_serve_is_learnt_before_anybody_asks(cell: CellStandIn, service: ApiService) -> None:
    service.connect()
    async with asyncio.timeout(10):
        while not cell.num_described:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    cell.away = True
    assert (await service.info()).model == "demo"


async def test_who_looks_after_a_change_is_shown_it_at_the_first_look(
    http: AsyncClient, cell: CellStandIn, service: ApiService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a rollout, "done", `/v1/models` once more told the policy and drafters of before."""
    monkeypatch.setattr("deployments.api_service._HEARD_LATELY_S", 0.0)
    assert (await service.info()).drafters == ("small", "lookup")
    cell.drafters = ["new"]
    assert (await http.get("/v1/models")).json()["data"][0]["drafters"] == ["new"]
    cell.drafters = ["newer"]
    described = await GenerationService(service).describe()
    assert list(described.model.drafters) == ["newer"]


async def test_who_looks_waits_for_no_cell_that_hangs(
    cell: CellStandIn, service: ApiService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.api_service._HEARD_LATELY_S", 0.0)
    monkeypatch.setattr("deployments.api_service._LEARN_S", 0.05)
    before = await service.info()
    never = asyncio.Event()
    monkeypatch.setattr(cell, "describe", never.wait)
    async with asyncio.timeout(3):
        assert await service.info(waits=True) == before
