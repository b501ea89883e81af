"""`GET /debug/decisions`, off by default: what a scheduler decided, as JSON and to be replayed."""

from __future__ import annotations

import functools
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from cluster.config import FlotillaConfig
from cluster.core import SchedulerCore
from cluster.cost_model import DEFAULT_PROFILE, CostModel
from cluster.recorded_core import make_core, newest_decisions
from cluster.succession import take_over
from deployments import cli
from deployments.api_service import ApiService
from deployments.openai_api import create_app
from tests.cluster.simulated import submit
from tests.cluster.test_core import World
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import ANSWER, codec, ids

PATH = "/debug/decisions"
RING = 12


@functools.cache
def core_with_decisions(size: int) -> SchedulerCore:
    """A scheduler core that has answered some requests; to be read only."""
    world = World(4, "adaserve")
    config = world.config.model_dump() | {"debug": {"decisions": size}}
    core = make_core(FlotillaConfig.model_validate(config), CostModel(DEFAULT_PROFILE))
    take_over(core, world.core, world.now)
    world.core = core
    for number in range(8):
        world.send(submit(number, world.rng))
    world.drain()
    return core


class DecidingCell(CellStandIn):
    """A stand-in that has the decisions of a real scheduler core."""

    def __init__(self, size: int) -> None:
        super().__init__(lambda submit: [*ids(ANSWER), *codec().eos_ids])
        self.core = core_with_decisions(size)

    async def decisions(self, limit: int) -> bytes | None:
        if self.away:
            raise ConnectionError("no such actor")
        return newest_decisions(self.core, limit)


@pytest.fixture(params=[RING])
async def deciding(request: pytest.FixtureRequest) -> AsyncIterator[DecidingCell]:
    cell = DecidingCell(request.param)
    yield cell
    await cell.close()


@pytest.fixture
async def client(deciding: DecidingCell) -> AsyncIterator[httpx.AsyncClient]:
    service = ApiService(deciding, codec(), give_up_after_s=0.5)
    transport = httpx.ASGITransport(app=create_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://cell") as made:
        yield made
    await service.close()


@pytest.mark.parametrize("deciding", [0], indirect=True)
async def test_off_by_default_and_says_how_to_turn_it_on(client: httpx.AsyncClient) -> None:
    response = await client.get(PATH)
    assert response.status_code == 404
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == "decisions_not_recorded"
    assert "debug: {decisions: 1000}" in error["message"]
    # What the message says to write is a configuration.
    FlotillaConfig.model_validate({"target": {"path": "x"}, "debug": {"decisions": 1000}})


async def test_the_newest_steps_with_all_that_explains_them(client: httpx.AsyncClient) -> None:
    body = (await client.get(PATH, params={"limit": 3})).json()
    assert body["object"] == "list"
    assert body["header"]["policy"]["name"] == "adaserve"
    assert len(body["data"]) == 3
    assert len((await client.get(PATH)).json()["data"]) == RING
    assert body["data"] == (await client.get(PATH)).json()["data"][-3:]
    steps = (await client.get(PATH, params={"limit": 100})).json()["data"]
    step = next(one for one in steps if "select" in one and any("chosen" in r for r in one["requests"]))
    assert step["whole"].keys() == {"predicted", "actual"}
    assert step["verify"].keys() == {"predicted", "actual", "profile", "profile_decoding"}
    assert step["select"]["budget"] > 0
    decision = next(one for one in step["requests"] if "chosen" in one)
    assert decision["request"]["drafter"] in ("good", "poor")
    assert decision["plan"]["depth"] > 0
    assert set(decision["chosen"]) <= {"slo-customized", "throughput-optimized"}
    assert len(decision["acceptance"]) == len(decision["tree"]["token"])
    assert {(table["drafter"], table["version"]) for table in body["calibration"]} >= {
        one for call in body["data"][-1]["plans"] for one in call["context"]["calibration"].items()
    }


async def test_what_is_fetched_as_lines_can_be_replayed(client: httpx.AsyncClient, tmp_path: Path) -> None:
    response = await client.get(PATH, params={"limit": 5, "format": "jsonl"})
    assert response.headers["content-type"] == "application/x-ndjson"
    file = tmp_path / "decisions.jsonl"
    file.write_bytes(response.content)
    result = CliRunner().invoke(cli.app, ["replay", str(file)])
    assert result.exit_code == 0, result.output
    assert "starts mid-way" in result.output
    assert result.output.count(": same (") == 5
    assert "5 steps: 5 the same, 0 different" in result.output


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "-1"}, "limit"),
        ({"limit": "many"}, "limit"),
        ({"limit": "9" * 5000}, "limit"),
        ({"format": "xml"}, "format"),
    ],
)
async def test_wrong_parameters_are_named(
    client: httpx.AsyncClient, params: dict[str, str], param: str
) -> None:
    response = await client.get(PATH, params=params)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_a_cell_that_is_away_is_a_503(client: httpx.AsyncClient, deciding: DecidingCell) -> None:
    deciding.away = True
    response = await client.get(PATH)
    assert response.status_code == 503
    assert "retry-after" in response.headers


async def test_the_route_is_documented(client: httpx.AsyncClient) -> None:
    route = (await client.get("/openapi.json")).json()["paths"][PATH]["get"]
    assert [one["name"] for one in route["parameters"]] == ["limit", "format"]


# -- the command -------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "decisions.jsonl"
    lines = newest_decisions(DecidingCell(1000).core, 1000)
    assert lines is not None
    made.write_bytes(lines)
    return made


def replay(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["replay", *map(str, arguments)])
    return result.exit_code, result.output


def test_decisions_that_differ_exit_with_1_and_are_shown(file: Path) -> None:
    assert replay(file)[0] == 0
    file.write_bytes(re.sub(rb'"plan":{"depth":[1-9]', b'"plan":{"depth":16', file.read_bytes()))
    code, output = replay(file, "--quiet")
    assert code == 1
    assert "DIFFERENT" in output
    assert "    - recorded: depth 16" in output
    assert "    + replayed: depth " in output
    assert ": same (" not in output


def test_another_policy_stands_beside_the_recorded_one(file: Path) -> None:
    code, output = replay(file, "--policy", "fixed", "-q")
    assert code == 0
    assert "recorded: adaserve" in output
    assert "replayed: fixed" in output
    assert "mean depth planned" in output


def test_files_that_are_no_records_exit_with_2_and_say_why(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    code, output = replay(file)
    assert code == 2
    assert "is cut off" in output
    assert ": same (" in output, "what came before the cut is replayed"
    file.write_bytes(b"")
    assert replay(file)[0] == 2
    file.write_bytes(b"\x93NUMPY")
    assert "line 1 is" in replay(file)[1]
    assert "cannot read" in replay(tmp_path / "nowhere")[1]
    assert "cannot read" in replay(tmp_path)[1]
    file.write_bytes(whole)
    code, output = replay(file, "--policy", "luck")
    assert code == 2
    assert "unknown policy" in output


async def test_how_workers_are_is_passed_on(deciding: DecidingCell, client: httpx.AsyncClient) -> None:
    answer = await client.get("/debug/workers")
    assert answer.status_code == 200
    assert answer.json() == {"object": "list", "data": await deciding.workers()}
    deciding.away = True
    assert (await client.get("/debug/workers")).status_code == 503
