"""The console's page and state, on a server that asks for keys."""

from __future__ import annotations

import json
import re
from urllib.parse import urljoin

import httpx
import pytest
from fastapi import FastAPI

from cluster.members import Member
from cluster.security_config import SecurityConfig
from deployments.api_keys import hash_key, new_key
from deployments.api_service import ApiService
from deployments.authentication import Authenticator
from deployments.console import PAGE, ConsoleState, counted
from deployments.openai_api import create_app
from tests.fakes.cell_stand_in import CellStandIn

KEY = new_key()
MEMBERS = (
    Member(kind="cell", id="one", node="10.0.0.1", endpoint=("10.0.0.1", 5, "secret"), stats={"kv_use": 0.5}),
    Member(kind="front_end", id="two", node="10.0.0.1", stats={"streams": 3.0}),
)
EXPOSITION = """\
# HELP flotilla_requests_total Requests that ended.
# TYPE flotilla_requests_total counter
flotilla_requests_total{cell="a",finish_reason="stop",tier="fast"} 3.0
flotilla_requests_total{cell="b",finish_reason="stop",tier="fast"} 4.0
# TYPE flotilla_requests_rejected_total counter
flotilla_requests_rejected_total{cell="a",code="queue_full",tier="fast"} 50.0
# TYPE flotilla_front_end_requests_rejected_total counter
flotilla_front_end_requests_rejected_total{code="queue_full",front_end="f",tier="fast"} 2.0
# TYPE flotilla_requests_running gauge
flotilla_requests_running{cell="a",tier="fast"} 9.0
# TYPE flotilla_drafter_requests gauge
flotilla_drafter_requests{cell="a",drafter="small",worker="small/0"} 2.0
flotilla_drafter_requests{cell="a",drafter="small",worker="small/1"} 1.0
# TYPE flotilla_drafter_capacity_price gauge
flotilla_drafter_capacity_price{cell="b",drafter="small"} 1.5
# TYPE flotilla_drafter_tokens_total counter
flotilla_drafter_tokens_total{cell="a",drafter="small",outcome="verified"} 10.0
flotilla_drafter_tokens_total{cell="a",drafter="small",outcome="accepted"} 6.0
# TYPE flotilla_slo_requests_total counter
flotilla_slo_requests_total{attained="true",cell="a",objective="all",tier="fast"} 2.0
flotilla_slo_requests_total{attained="true",cell="b",objective="all",tier="fast"} 1.0
flotilla_slo_requests_total{attained="false",cell="b",objective="all",tier="fast"} 1.0
flotilla_slo_requests_total{attained="false",cell="b",objective="tpot",tier="fast"} 5.0
"""


class Asked:
    """An exposition that counts how often it was asked for."""

    def __init__(self) -> None:
        self.times = 0

    async def __call__(self) -> str:
        self.times += 1
        return EXPOSITION


def guarded(service: ApiService) -> FastAPI:
    keys = Authenticator(SecurityConfig(key_hash=hash_key(KEY)), environment={})
    console = ConsoleState(service, Asked(), lambda: MEMBERS)
    return create_app(service, authenticator=keys, console=console)


@pytest.fixture
def app(service: ApiService) -> FastAPI:
    return guarded(service)


def test_metrics_of_several_cells_are_counted_together() -> None:
    found = counted(EXPOSITION)
    assert found["totals"]["requests"] == 7
    assert found["totals"]["rejected"] == 2, "what another cell took was not refused"
    first, second = found["pool"]
    assert (first["cell"], first["kind"], first["requests"]) == ("a", "small", 3)
    assert (first["verified"], first["accepted"], first["price"]) == (10, 6, 0)
    assert (second["cell"], second["price"]) == ("b", 1.5)
    assert found["attainment"] == [{"tier": "fast", "attained": 3, "missed": 1}]


def test_names_may_hold_what_python_takes_for_the_end_of_a_line() -> None:
    found = counted(EXPOSITION.replace('"fast"', '"fa\u2028st"'))
    assert found["attainment"] == [{"tier": "fa\u2028st", "attained": 3, "missed": 1}]


async def test_the_page_comes_without_a_key_and_from_here_alone(http: httpx.AsyncClient) -> None:
    page = await http.get("/console")
    assert page.status_code == 200
    files = re.findall(r'(?:href|src)="(?!data:|#)([^"]*)"', page.text)
    assert len(files) == 2
    for name in files:
        assert (await http.get(urljoin("/console", name))).status_code == 200
        assert urljoin("/behind/a/console", name).startswith("/behind/a/console/"), (
            "a proxy may have a prefix"
        )
    slashed = await http.get("/console/")
    assert slashed.status_code == 308
    assert urljoin("http://host/behind/console/", slashed.headers["location"]) == "http://host/behind/console"
    for path in PAGE.iterdir():
        response = await http.get("/console" if path.name == "index.html" else f"/console/{path.name}")
        assert response.content == path.read_bytes()
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        again = await http.get(response.url.path, headers={"If-None-Match": response.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    for absent in ("nothing.js", "..%2fcli.py", "%2e%2e", ".."):
        assert (await http.get(f"/console/{absent}")).status_code in (401, 404)


def test_nothing_is_ever_parsed_as_markup() -> None:
    for path in PAGE.glob("*.js"):
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|localStorage", path.read_text()
        )
        assert not found, path
    page = (PAGE / "index.html").read_text()
    assert not re.findall(
        r"<script(?![^>]*src=)|<style|\sstyle=|\son[a-z]+=|https?://(?!www\.w3\.org/2000/svg)", page
    )


async def test_the_state_needs_a_key_and_tells_no_secret(http: httpx.AsyncClient) -> None:
    assert (await http.get("/console/state")).status_code == 401
    response = await http.get("/console/state", headers={"Authorization": f"Bearer {KEY}"})
    assert response.status_code == 200
    state = response.json()
    assert (state["model"], state["policy"], state["drafters"]) == ("demo", "flotilla", ["small", "lookup"])
    assert [tier["id"] for tier in state["tiers"]] == ["default", "fast"]
    assert state["cells"] == [{"id": "one", "state": "ready", "stage": "", "kv_use": 0.5}]
    assert state["front_ends"] == [{"id": "two", "state": "ready", "streams": 3.0}]
    assert "secret" not in response.text
    assert "10.0.0.1" not in response.text


async def test_drafters_are_offered_by_kind(cell: CellStandIn, service: ApiService) -> None:
    """Who takes a kind from the choice means all its instances; tokens are told of as the kind's."""
    cell.drafters = ["small", "lookup", "small/0", "small/1"]
    assert json.loads(await ConsoleState(service, Asked()).json())["drafters"] == ["small", "lookup"]


async def test_many_lookers_ask_the_members_once(service: ApiService) -> None:
    now, asked = [50.0], Asked()
    state = ConsoleState(service, asked, clock=lambda: now[0])
    first = await state.json()
    assert await state.json() is first
    assert asked.times == 1
    now[0] += 1.0
    assert json.loads(await state.json()) == json.loads(first)
    assert asked.times == 2


async def test_instances_are_told_of_one_cell_and_left_out_if_they_cannot_be_had(service: ApiService) -> None:
    instance = {
        "name": "small/0", "kind": "small", "state": "loading", "load": 0, "restarts": 2,
        "waits_for": "a GPU", "pid": 7, "node": "10.0.0.1",
    }  # fmt: skip

    async def drafters() -> list[dict[str, object]]:
        return [instance]

    async def lost() -> list[dict[str, object]]:
        raise ConnectionError("no such actor")

    state = json.loads(await ConsoleState(service, Asked(), lambda: MEMBERS, drafters).json())
    assert state["instances"] == [{name: instance[name] for name in list(instance)[:6]}]
    for members, ask in ((MEMBERS, lost), ((*MEMBERS, MEMBERS[0]), drafters)):
        state = json.loads(await ConsoleState(service, Asked(), lambda members=members: members, ask).json())
        assert state["instances"] == []
