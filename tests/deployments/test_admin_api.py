"""`/admin/drafters` and `flotilla drafters`: off by default, local only, errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from typer.testing import CliRunner

from cluster.pool_errors import DrafterFailed, NotServing, PoolError, UnknownDrafter
from deployments import cli
from deployments.api_service import ApiService
from deployments.openai_api import create_app
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import codec

PATH = "/admin/drafters"
LOOKUP = {"kind": "prompt_lookup", "name": "lookup"}


class Pool:
    """Remembers what was asked; answers with one instance, or raises."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
        self.state = "ready"

    def _answer(self, *asked: Any) -> list[dict[str, Any]]:
        self.asked.append(asked)
        if self.error is not None:
            raise self.error
        return [
            {
                "name": "lookup",
                "kind": "lookup",
                "state": self.state,
                "load": 1,
                "max_requests": 8,
                "restarts": 2,
                "recovery_s": 1.25,
                "node": "0123456789abcdef",
                "costs": "measured",
                "waits_for": "" if self.state == "ready" else "waiting for 1 GPU",
            }
        ]

    async def drafters(self) -> list[dict[str, Any]]:
        return self._answer("list")

    async def add_drafter(self, config: dict[str, Any]) -> list[dict[str, Any]]:
        return self._answer("add", config)

    async def replace_drafter(self, config: dict[str, Any]) -> list[dict[str, Any]]:
        return self._answer("replace", config)

    async def scale_drafter(self, kind: str, replicas: int) -> list[dict[str, Any]]:
        return self._answer("scale", kind, replicas)

    async def drain_drafter(self, name: str) -> list[dict[str, Any]]:
        return self._answer("drain", name)

    async def remove_drafter(self, name: str) -> None:
        self._answer("remove", name)


@pytest.fixture
def pool() -> Pool:
    return Pool()


def over(app_pool: Pool | None, cell: CellStandIn, address: str = "127.0.0.1") -> httpx.AsyncClient:
    app = create_app(ApiService(cell, codec(), give_up_after_s=0.5), pool=app_pool)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False, client=(address, 1234))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")


@pytest.fixture
async def cell() -> AsyncIterator[CellStandIn]:
    stand_in = CellStandIn(lambda submit: [])
    yield stand_in
    await stand_in.close()


@pytest.fixture
async def http(pool: Pool, cell: CellStandIn) -> AsyncIterator[httpx.AsyncClient]:
    async with over(pool, cell) as client:
        yield client


async def test_it_is_off_by_default_and_says_how_to_turn_it_on(cell: CellStandIn) -> None:
    async with over(None, cell) as client:
        answer = await client.get(PATH)
        assert answer.status_code == 404
        assert "admin: true" in answer.json()["error"]["message"]


async def test_every_verb_reaches_the_pool(pool: Pool, http: httpx.AsyncClient) -> None:
    assert (await http.get(PATH)).json()["data"][0]["name"] == "lookup"
    assert (await http.post(PATH, json=LOOKUP)).status_code == 201
    for name in ("lookup", "lookup%2F0"):  # the pool says what is wrong with the name of an instance
        assert (await http.patch(f"{PATH}/{name}", json={"replicas": 3})).status_code == 200
    assert (await http.delete(f"{PATH}/lookup/1?drain=true")).status_code == 202
    gone = await http.delete(f"{PATH}/lookup/1")
    assert (gone.status_code, gone.json()["deleted"]) == (200, True)
    asked = [entry[:2] if entry[0] != "add" else entry[:1] for entry in pool.asked]
    scaled = [("scale", "lookup"), ("scale", "lookup/0")]
    assert asked == [("list",), ("add",), *scaled, ("drain", "lookup/1"), ("remove", "lookup/1")]
    assert pool.asked[1][1]["max_ngram"] == 4


async def test_a_replacement_names_whom_it_replaces(pool: Pool, http: httpx.AsyncClient) -> None:
    answer = await http.put(f"{PATH}/lookup", json=LOOKUP | {"max_ngram": 3})
    assert answer.status_code == 200
    assert (pool.asked[-1][0], pool.asked[-1][1]["max_ngram"]) == ("replace", 3)
    renamed = await http.put(f"{PATH}/other", json=LOOKUP)
    assert (renamed.status_code, renamed.json()["error"]["param"]) == (400, "name")
    assert len(pool.asked) == 1


async def test_what_still_loads_is_accepted_not_created(pool: Pool, http: httpx.AsyncClient) -> None:
    pool.state = "loading"
    assert (await http.post(PATH, json=LOOKUP)).status_code == 202


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (UnknownDrafter("there is no drafter `x`"), 404, "drafter_not_found"),
        (DrafterFailed("no model at /x"), 400, "drafter_failed"),
        (DrafterFailed("it died before it had finished."), 400, "drafter_failed"),
        (NotServing("the cell is still starting"), 503, "service_unavailable"),
        (PoolError("there is one already"), 409, "pool_conflict"),
        (ConnectionError("no such actor"), 503, "service_unavailable"),
    ],
)
async def test_refusals_have_a_status_and_a_sentence(
    pool: Pool, http: httpx.AsyncClient, error: Exception, status: int, code: str
) -> None:
    pool.error = error
    answer = await http.post(PATH, json=LOOKUP)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    message = answer.json()["error"]["message"]
    assert message[0].isupper()
    assert message[-1] == "." != message[-2]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"kind": "nonsense", "name": "x"}, "kind"),
        ({"name": "x"}, "kind"),
        ({"kind": "model", "name": "x"}, "path"),
        ({"kind": "model", "name": "x/0", "path": "p"}, "name"),
        ({**LOOKUP, "replicas": 0}, "replicas"),
        ({**LOOKUP, "placement": {"num_gpus": 1.5}}, "placement.num_gpus"),
        ({**LOOKUP, "colour": "red"}, "colour"),
    ],
)
async def test_a_wrong_drafter_is_a_400_that_names_the_field(
    pool: Pool, http: httpx.AsyncClient, body: dict[str, Any], field: str
) -> None:
    answer = await http.post(PATH, json=body)
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == field
    assert not pool.asked


async def test_replicas_are_a_whole_number_above_zero(pool: Pool, http: httpx.AsyncClient) -> None:
    for replicas in (0, 65, "2", 1.5, None):
        answer = await http.patch(f"{PATH}/lookup", json={"replicas": replicas})
        assert answer.status_code == 400
        assert "replicas" in answer.json()["error"]["message"]
    assert not pool.asked


async def test_only_people_on_the_machine_are_admitted(pool: Pool, cell: CellStandIn) -> None:
    async with over(pool, cell, "192.0.2.7") as far:
        assert (await far.get(PATH)).status_code == 403
    async with over(pool, cell) as near:
        assert (await near.get(PATH, headers={"Host": "rebound.example"})).status_code == 403
        for header in ("X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP", "Via", "Forwarded"):
            assert (await near.get(PATH, headers={header: "192.0.2.7"})).status_code == 403
        assert (await near.get(PATH, headers={"Host": "localhost"})).status_code == 200
        # What a page in a browser may send without asking.
        plain = await near.post(PATH, content=json.dumps(LOOKUP), headers={"Content-Type": "text/plain"})
        assert plain.status_code == 415
    assert [entry[0] for entry in pool.asked] == ["list"]


@pytest.fixture
def app(pool: Pool, cell: CellStandIn) -> FastAPI:
    return create_app(ApiService(cell, codec(), give_up_after_s=0.5), pool=pool)


async def test_the_command_shows_what_the_server_says(pool: Pool, url: str, tmp_path: Path) -> None:
    shown = await run(url, "list")
    assert "lookup" in shown
    assert "1 of 8" in shown
    file = tmp_path / "drafter.yaml"
    file.write_text("kind: prompt_lookup\nname: lookup\n")
    await run(url, "add", str(file), "--replicas", "2")
    assert pool.asked[-1][1]["replicas"] == 2
    await run(url, "add", "--name", "small", "--path", "/models/small", "--num-gpus", "0.5")
    assert pool.asked[-1][1]["placement"]["num_gpus"] == 0.5
    await run(url, "scale", "lookup", "3")
    await run(url, "remove", "lookup/1")
    await run(url, "remove", "lookup/1", "--no-drain")
    assert [entry[0] for entry in pool.asked[-3:]] == ["scale", "drain", "remove"]
    pool.error = UnknownDrafter("there is no drafter `x`")
    assert "There is no drafter `x`" in await run(url, "remove", "x", code=2)
    pool.error, pool.state = None, "restarting"
    assert "waiting for 1 GPU" in await run(url, "list")


async def run(url: str, *arguments: str, code: int = 0) -> str:
    done = await asyncio.to_thread(CliRunner().invoke, cli.app, ["drafters", *arguments, "--url", url])
    assert done.exit_code == code, done.output
    return done.output
