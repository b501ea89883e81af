"""The API over a stand-in cell, reached in process and over a socket."""

from __future__ import annotations

import functools
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from cluster.tier_config import TierConfig
from deployments.api_service import ApiService
from deployments.cell_clients import CellClients
from deployments.openai_api import create_app
from tests.deployments.socket_server import served
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.listed_cells import Listed
from tests.fakes.tiny_tokenizer import ANSWER, codec, ids

# An application takes longer to make than most tests: all use one, which answers with this object. Each test
# sets it up anew.
SERVICE = ApiService.__new__(ApiService)


@functools.cache
def shared_app() -> FastAPI:
    return create_app(SERVICE, max_body_bytes=20_000)


@pytest.fixture
async def cell() -> AsyncIterator[CellStandIn]:
    stand_in = CellStandIn(lambda submit: [*ids(ANSWER), *codec().eos_ids])
    yield stand_in
    await stand_in.close()


@pytest.fixture
def tool_parser() -> str:
    """How the model writes calls; for tests that say otherwise."""
    return "hermes"


@pytest.fixture
async def service(cell: CellStandIn, tool_parser: str) -> AsyncIterator[ApiService]:
    made = ApiService(
        cell,
        codec(),
        tiers={"fast": TierConfig(tpot_ms=10, ttft_ms=100)},
        give_up_after_s=1.5,  # machines that run tests stand still for longer than half a second
        tool_parser=tool_parser,
    )
    vars(SERVICE).clear()  # also of what a test has put there
    vars(SERVICE).update(vars(made))
    yield SERVICE
    await SERVICE.close()


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
async def app(service: ApiService) -> AsyncIterator[FastAPI]:
    assert service is SERVICE
    yield shared_app()
    await shared_app().state.answers.close()  # one test's are not the next one's


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    headers = {"Content-Type": "application/json"}  # of bodies that tests write themselves
    async with httpx.AsyncClient(transport=transport, base_url="http://cell", headers=headers) as client:
        yield client


@pytest.fixture
async def url(app: FastAPI) -> AsyncIterator[str]:
    """The app behind a real server: only there a client can hang up, and chunks arrive one by one."""
    async with served(app) as address:
        yield address


@pytest.fixture
async def listed() -> AsyncIterator[Listed]:
    made = Listed()
    yield made
    for name in list(made.stand_ins):
        await made.kill(name)


@pytest.fixture
async def clients(listed: Listed) -> AsyncIterator[CellClients]:
    made = CellClients(listed, give_up_after_s=0.6, silent_s=0.1)
    made.connect()
    yield made
    await made.close()
