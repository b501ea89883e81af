"""A front end that goes stays for its streams, as long as somebody can end them."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config import FlotillaConfig
from cluster.members import Member, State
from cluster.stream_messages import Submit
from deployments.directory import Directory
from deployments.front_end import FrontEnd
from deployments.leaving import a_cell_stays, streams_end
from deployments.pending_requests import CellLost
from engine.sampling_params import SamplingParams
from tests.fakes.tiny_tokenizer import codec


def cell(state: State) -> Member:
    return Member(kind="cell", id=state, node="n", state=state)


@dataclass
class Heard:
    members: list[Member] = field(default_factory=list)
    heard_at: float = field(default_factory=time.monotonic)


class Streams:
    """Open for so long."""

    def __init__(self, last_s: float) -> None:
        self._end = time.monotonic() + last_s

    def __call__(self) -> bool:
        return time.monotonic() < self._end


async def waited(
    last_s: float, heard: Heard, least_s: float, most_s: float, *, is_connected: bool = False
) -> float:
    began = time.monotonic()
    stays = partial(a_cell_stays, heard, lambda: is_connected)
    await streams_end(Streams(last_s), stays, least_s=least_s, most_s=most_s)
    return time.monotonic() - began


@pytest.mark.parametrize("state", ["ready", "starting"])
async def test_it_waits_for_streams_as_long_as_a_cell_may_end_them(state: State) -> None:
    assert 0.6 <= await waited(0.6, Heard([cell("draining"), cell(state)]), 0.1, math.inf) < 5


async def test_it_waits_while_a_cell_is_connected_and_the_directory_is_replaced() -> None:
    heard = Heard([cell("ready")], heard_at=-math.inf)
    assert 0.6 <= await waited(0.6, heard, 0.1, math.inf, is_connected=True) < 5


async def test_what_is_heard_of_cells_counts_more_than_connections_to_them() -> None:
    assert 0.1 <= await waited(math.inf, Heard([cell("draining")]), 0.1, 60, is_connected=True) < 5


@pytest.mark.parametrize("last_s", [0.0, 0.6])
async def test_it_waits_no_longer_than_for_the_last(last_s: float) -> None:
    assert await waited(last_s, Heard([cell("ready")]), 30, 60) < 15


@pytest.mark.parametrize(
    "heard",
    [
        Heard(),
        Heard([cell("draining")]),
        Heard([Member(kind="front_end", id="f", node="n")]),
        Heard([cell("ready")], heard_at=-math.inf),
    ],
    ids=["nobody", "cells that go", "front ends", "old news"],
)
async def test_without_a_cell_it_has_the_time_that_cells_have(heard: Heard) -> None:
    assert 0.5 <= await waited(math.inf, heard, 0.5, 60) < 15


async def test_its_time_ends() -> None:
    assert 0.5 <= await waited(math.inf, Heard([cell("ready")]), 0.1, 0.5) < 15


async def test_a_new_directory_answers_when_all_have_reported() -> None:
    """Who believed an earlier answer would forget the cells that are still to report."""
    directory = Directory()
    first = asyncio.create_task(directory.report(Member(kind="front_end", id="f", node="n")))
    await asyncio.sleep(0.3)
    assert not first.done()
    second = await directory.report(cell("ready"))
    assert [one.id for one in await first] == [one.id for one in second] == ["ready", "f"]
    began = time.monotonic()
    assert len(await directory.members()) == 2
    assert time.monotonic() - began < 0.5


async def test_its_last_spans_are_sent_before_it_ends() -> None:
    """Ray Serve kills its process then, with all that is sent every few seconds only."""
    done: list[str] = []

    async def note(name: str, *_: object) -> None:
        done.append(name)

    going = SimpleNamespace(
        _service=None,
        _is_draining=False,
        _config=FlotillaConfig.model_validate({"target": {"path": "unused"}}),
        _server=None,
        _directory=SimpleNamespace(leave=partial(note, "left"), members=[], heard_at=-math.inf),
        _tracer=SimpleNamespace(leave=partial(note, "exported")),
        _turn_new_connections_away=partial(note, "turned away"),
        _a_cell_stays=lambda: False,
        _drain_grpc=partial(note, "drained"),
        _cut_off_http=partial(note, "cut off"),
        _answers_http=lambda: False,
    )
    # Below what Ray Serve makes of the class.
    replica: Any = FrontEnd.__mro__[1]
    await replica.__del__(going)
    assert done[0] == "turned away"
    assert done[-3:] == ["cut off", "left", "exported"]


async def test_requests_wait_for_a_cell_as_long_as_is_configured() -> None:
    """One whose only cell loads a large model again needs more than usual, and nobody is told late."""
    arrived = SimpleNamespace(
        _cell=None,
        _codec=codec(),
        _sampling=None,
        _services=[],
        _is_draining=False,
        _directory=SimpleNamespace(members=[]),
        _config=FlotillaConfig.model_validate({"target": {"path": "unused"}, "health": {"cell_wait_s": 0.3}}),
    )
    replica: Any = FrontEnd.__mro__[1]
    service = replica._make_service(arrived)
    began = time.monotonic()
    submit = Submit(request_id="r", prompt=[1], sampling=SamplingParams(max_tokens=1))
    with pytest.raises(CellLost, match="did not come back"):
        await anext(service.client.submit(submit))
    assert 0.3 <= time.monotonic() - began < 15
    await service.client.close()


async def test_neither_http_nor_grpc_lets_connections_begin_before_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr("deployments.front_end._LAST_REQUESTS_S", 0.1)
    monkeypatch.setattr(
        "deployments.front_end.turn_new_connections_away", lambda listener: done.append(listener)
    )
    replica: Any = FrontEnd.__mro__[1]
    for server in (SimpleNamespace(should_exit=False), None):
        done.clear()
        going = SimpleNamespace(
            _server=server,
            _listener="http",
            _grpc=SimpleNamespace(turn_new_connections_away=lambda: done.append("grpc")),
        )
        began = time.monotonic()
        await replica._turn_new_connections_away(going)
        assert time.monotonic() - began >= 0.1
        assert done == (["grpc"] if server is None else ["http", "grpc"])


@pytest.mark.parametrize("stays", [True, False])
def test_connections_are_kept_a_while_where_another_front_end_stays(stays: bool) -> None:
    """Where all go, the whole system stops, and is not to be held up by who asks nothing."""
    replica: Any = FrontEnd.__mro__[1]
    goes, other = (Member(kind="front_end", id=name, node="n", state="draining") for name in ("a", "b"))
    heard = [cell("ready"), goes, Member(kind="front_end", id="c", node="n") if stays else other]
    assert replica._another_stays(SimpleNamespace(_directory=Heard(heard))) is stays


@pytest.mark.parametrize("goes", [True, False])
async def test_who_is_removed_before_it_listens_never_does(
    goes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began to, took requests for as long as streams may last, and broke those that it had then."""
    done: list[str] = []
    starting = SimpleNamespace(
        _config=FlotillaConfig.model_validate({"target": {"path": "unused"}}),
        _directory=Heard(),
        _id="a",
        _is_draining=False,
        _begin_to_listen=lambda: done.append("listens"),
        _make_app=lambda *_, **__: None,
        _service=None,
    )

    async def cells_serve(*_: object) -> None:
        starting._is_draining = goes

    monkeypatch.setattr("deployments.front_end.cells_serve", cells_serve)
    replica: Any = FrontEnd.__mro__[1]
    await replica.__serve_build_asgi_app__(starting)
    assert done == ([] if goes else ["listens"])
