"""What a rollout may change; that it fails no request is a system test (tests/system/test_cells.py)."""

from __future__ import annotations

import asyncio
import io
import re
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient
from ray._private import services
from ray.exceptions import ActorUnavailableError
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
    ReplicaState,
    ServeStatus,
)
from rich.console import Console
from starlette.responses import PlainTextResponse, Response
from typer.testing import CliRunner

from cluster.config import FlotillaConfig
from cluster.members import Member, State
from deployments import cli, rollout, serving
from deployments.api_keys import find_key, hash_key
from deployments.application import APP_NAME
from deployments.farewell import Farewell
from deployments.key_store import KeyStore
from deployments.preflight import StartError
from deployments.reloading import roll_out
from deployments.rollout import Progress, RolloutError, allowed
from tests.fakes.cell_stand_in import CellStandIn

RUNNING = FlotillaConfig.model_validate(
    {
        "target": {"path": "/models/target"},
        "http": {"port": 8123},
        "grpc": {"port": 9123},
        "security": {"key_hash": f"hmac-sha256:{'0' * 32}:{'1' * 64}"},
    }
)


def wanted(**changes: dict[str, object]) -> FlotillaConfig:
    raw: dict[str, dict[str, object]] = {"target": {"path": "/models/target"}}
    for section, fields in changes.items():
        raw[section] = raw.get(section, {}) | fields
    raw["http"] = {"port": 8123} | raw.get("http", {})
    raw["grpc"] = {"port": 9123} | raw.get("grpc", {})
    return FlotillaConfig.model_validate(raw)


def test_what_is_wanted_is_taken_on_the_ports_and_with_the_key_in_use() -> None:
    change = wanted(
        http={"port": 0}, grpc={"port": 0}, policy={"name": "smartspec"}, scheduler={"max_running": 3}
    )
    config = allowed(RUNNING, change)
    assert (config.http.port, config.grpc.port) == (8123, 9123)
    assert config.security.key_hash == RUNNING.security.key_hash
    assert (config.policy.name, config.scheduler.max_running) == ("smartspec", 3)
    assert allowed(config, config) == config


@pytest.mark.parametrize("key", ["", "flotilla-0123456789abcdefghij"])
def test_a_key_that_is_taken_out_of_the_file_is_none_after_the_signal(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on opening everything: what the file did not say was taken for the key of the environment."""
    before = "flotilla-abcdefghij0123456789"
    security = RUNNING.security.model_copy(update={"key_hash": hash_key(before)})
    running, asked = RUNNING.model_copy(update={"security": security}), []

    def begin(change: FlotillaConfig, *, keeps_key: bool) -> Iterator[Progress]:
        asked.append(allowed(running, change, keeps_key=keeps_key))
        return iter([])

    monkeypatch.setattr("deployments.reloading.begin", begin)
    monkeypatch.setenv("FLOTILLA_API_KEY", key)
    console = Console(record=True, file=io.StringIO())
    roll_out(wanted, console, lambda: False, iter(()))
    assert console.export_text() == ""
    keys = KeyStore(asked[0].security, {}).keys()
    assert [find_key(one, keys) is not None for one in (before, key)] == [False, bool(key)]


@pytest.mark.parametrize(
    "change",
    [
        {"target": {"path": "/models/other"}},
        {"target": {"dtype": "bfloat16"}},
        {"target": {"served_name": "other"}},
        {"http": {"port": 1}},
        {"http": {"direct": False}},
        {"grpc": {"enabled": True}},
    ],
)
def test_what_clients_or_requests_under_way_rely_on_is_refused_by_name(
    change: dict[str, dict[str, object]],
) -> None:
    (section, fields), *_ = change.items()
    (name, value), *_ = fields.items()
    with pytest.raises(RolloutError, match=f"{section}\\.{name} .*{re.escape(str(value))}"):
        allowed(RUNNING, wanted(**change))


def member(kind: Literal["cell", "front_end"], name: str, state: State = "ready") -> Member:
    return Member(kind=kind, id=name, node="here", state=state)


def progress(status: str, *members: Member) -> Progress:
    return Progress(status, "", members, frozenset(("old-cell", "old-front-end")))


def steps() -> Iterator[tuple[Progress, bool]]:
    old = member("cell", "old-cell"), member("front_end", "old-front-end")
    new = member("cell", "new-cell"), member("front_end", "new-front-end")
    yield progress("DEPLOYING", *old), False
    yield progress("RUNNING", *old), False
    yield progress("RUNNING"), False
    yield progress("RUNNING", *new, member("cell", "old-cell", "draining")), False
    yield progress("RUNNING", new[1], member("cell", "new-cell", "starting")), False
    yield progress("DEPLOYING", *new), False
    yield progress("RUNNING", *new), True


def test_it_is_done_when_all_that_are_there_are_new_and_serve() -> None:
    for seen, done in steps():
        assert seen.is_done is done, seen
        assert not seen.has_failed
    assert progress("DEPLOY_FAILED").has_failed
    shown = progress("RUNNING", member("cell", "new"), member("front_end", "old-front-end")).summary()
    assert shown == "cells: 1 of 1 new ready, 0 old left; front ends: 0 of 0 new ready, 1 old left"


def test_a_controller_that_is_made_again_meanwhile_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was the end of the command, with a traceback."""
    application = ApplicationStatusOverview(
        status=ApplicationStatus.RUNNING, message="", last_deployed_time_s=0.0, deployments={}
    )
    there = ServeStatus(applications={APP_NAME: application})
    told: list[ServeStatus | Exception] = [
        there,
        ActorUnavailableError("the controller is gone", b"0" * 16),
        ServeStatus(),  # none there, either
        there,
    ]

    def status() -> ServeStatus:
        found = told.pop(0) if told else ActorUnavailableError("for good", b"0" * 16)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(rollout.serve, "status", status)
    monkeypatch.setattr(rollout, "_POLL_S", 0.01)
    monkeypatch.setattr(rollout, "_SILENCE_S", 1.0)
    seen = rollout._told()
    assert [next(seen), next(seen)] == [application, application]
    assert told == []
    with pytest.raises(RolloutError, match=r"for 1 s.*for good"):
        next(seen)


def cells(trigger: str, message: str = "", **replicas: int) -> ApplicationStatusOverview:
    """Told while a new configuration is rolled out, of which something failed."""
    deployment = DeploymentStatusOverview(
        status=DeploymentStatus.DEPLOY_FAILED,
        status_trigger=DeploymentStatusTrigger(trigger),
        replica_states={ReplicaState(state): count for state, count in replicas.items()},
        message=message,
    )
    return ApplicationStatusOverview(
        status=ApplicationStatus.DEPLOY_FAILED,
        message="Failed to update the deployments ['Cell'].",
        last_deployed_time_s=0.0,
        deployments={"Cell": deployment},
    )


def following(
    monkeypatch: pytest.MonkeyPatch, told: list[ApplicationStatusOverview], there: Sequence[Member] = ()
) -> list[Progress]:
    """What is seen of a rollout of which Ray Serve tells this."""

    left: list[str] = []

    async def members() -> list[Member]:
        return list(there)

    class FrontEnd:
        def __getattr__(self, _: str) -> FrontEnd:
            return self

        def remote(self) -> FrontEnd:
            return self

        def shutdown(self) -> None:
            left.append("FrontEnd")

        def result(self, timeout_s: float) -> object:
            return RUNNING.model_dump(mode="json")

    monkeypatch.setattr(rollout.serve, "get_deployment_handle", lambda *_: FrontEnd())
    monkeypatch.setattr(rollout.serve, "run_many", lambda *_, **__: None)
    monkeypatch.setattr(rollout, "_members", members)
    monkeypatch.setattr(rollout, "_told", lambda: iter(told))
    seen = list(rollout.begin(wanted()))
    # Its calls were told to Ray Serve for ever else, with a traceback once the command had left Ray.
    assert left == ["FrontEnd"]
    return seen


def test_a_new_cell_that_is_lost_before_the_old_ones_have_ended_is_not_the_end_of_a_rollout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray Serve calls it failed until another is there: the former file was to be rolled out, for nothing."""
    lost = "A replica's health check failed."
    told = [
        cells("HEALTH_CHECK_FAILED", lost, STOPPING=1),
        cells("HEALTH_CHECK_FAILED", lost),  # for a moment nothing is made
        cells("HEALTH_CHECK_FAILED", lost, STARTING=1, STOPPING=1),
        cells("HEALTH_CHECK_FAILED", lost, RUNNING=1, STOPPING=1),
    ]
    seen = following(monkeypatch, told)
    assert [one.has_failed for one in seen] == [False] * 4
    monkeypatch.setattr(rollout, "_GIVEN_UP_S", 0.0)
    assert following(monkeypatch, [cells("HEALTH_CHECK_FAILED", lost, RUNNING=1)])[-1].has_failed


def test_why_new_cells_cannot_start_is_said_without_where_in_the_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout, "_GIVEN_UP_S", 0.0)
    raised = (
        "It failed 3 times. Error:\nTraceback:\n  File x, line 1\nRuntimeError: the cell could not start\n"
    )
    (seen,) = following(monkeypatch, [cells("REPLICA_STARTUP_FAILED", raised, STOPPING=1)])
    assert seen.has_failed
    assert (
        seen.message
        == "Failed to update the deployments ['Cell']. Cell: RuntimeError: the cell could not start"
    )


def test_what_new_cells_wait_for_is_said_until_they_have_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command said for ever that none of none was ready."""
    lacking = (
        "Deployment 'Cell' in application 'flotilla' has 1 replicas that have taken more than 30s to be "
        'scheduled. Resources required for each replica: {"GPU": 1.0}, total resources available: {}. Use '
        "`ray status` for more details."
    )
    application = cells("CONFIG_UPDATE_STARTED", lacking, STARTING=1, RUNNING=1)
    application.status = ApplicationStatus.DEPLOYING
    there = [member("cell", "old-cell"), member("front_end", "new")]
    (seen,) = following(monkeypatch, [application], there)
    assert seen.summary().endswith('; Cell waits for a machine with {"GPU": 1.0}, of which {} is free')
    placed = [*there, member("cell", "new-cell", "starting")]
    (seen,) = following(monkeypatch, [application], placed)
    assert seen.summary().endswith(" old left")


def test_while_nobody_tells_who_is_there_it_is_not_said_that_nobody_is() -> None:
    assert progress("DEPLOYING").summary().startswith("waiting for the directory")


def test_the_command_says_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    path = tmp_path / "new.yaml"
    path.write_text("target: {path: zoo:target-8x384}\npolicy: {nmae: x}\n")
    result = CliRunner().invoke(cli.app, ["rollout", str(path)])
    assert result.exit_code == 2
    assert "policy.nmae" in result.output


def test_the_command_says_at_once_that_no_ray_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray tried again for minutes where `flotilla serve` had a Ray of its own."""
    path = tmp_path / "same.yaml"
    path.write_text("target: {path: zoo:target-8x384}\n")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        monkeypatch.setattr(services, "canonicalize_bootstrap_address", lambda _: address)
        result = CliRunner().invoke(cli.app, ["rollout", str(path)])
    assert result.exit_code == 2
    assert f"nobody answers at {address}" in result.output
    assert "SIGHUP" in result.output


def test_a_server_that_reads_a_wrong_file_again_says_that_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On SIGHUP: it said `rollout: 2`, the status by which the command would have ended."""
    path = tmp_path / "cell.yaml"
    path.write_text("target: {path: zoo:target-8x384}\nhttp: {port: 0}\n")

    def run(_: FlotillaConfig, reload: Callable[[], FlotillaConfig]) -> None:
        path.write_text("target: {path: zoo:target-8x384}\npolicy: {nmae: x}\n")
        with pytest.raises(StartError, match="nothing is changed"):
            reload()

    monkeypatch.setattr(serving, "run", run)
    cli.serve(path)
    assert "policy.nmae: there is no such field" in capsys.readouterr().err


def test_a_server_that_reads_its_file_again_warns_of_it_as_when_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing would be drafted from then on, and nobody would know why."""
    path = tmp_path / "cell.yaml"
    path.write_text("target: {path: zoo:target-8x384}\nhttp: {port: 0}\n")

    def run(_: FlotillaConfig, reload: Callable[[], FlotillaConfig]) -> None:
        path.write_text(f"{path.read_text()}selector: {{name: fixed, drafters: [gone]}}\n")
        assert reload().selector.drafters == ("gone",)

    monkeypatch.setattr(serving, "run", run)
    cli.serve(path)
    assert "warning: selector.drafters names gone, but" in capsys.readouterr().err


def test_a_signal_while_models_load_is_for_later_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of who writes the configuration and tells the server, whatever it is doing."""
    rolled_out = []

    @contextmanager
    def running(*_: object, **__: object) -> Iterator[str]:
        handler = signal.getsignal(signal.SIGHUP)
        assert callable(handler), "it would end the process"
        handler(signal.SIGHUP, None)
        yield "http://here"

    def roll_out_once(*_: object) -> None:
        rolled_out.append(True)
        raise serving._Interrupted

    monkeypatch.setattr(serving, "running", running)
    monkeypatch.setattr(serving, "_describe", dict)
    monkeypatch.setattr(serving, "print_welcome", lambda *_: None)
    monkeypatch.setattr(serving, "roll_out", roll_out_once)
    before = signal.getsignal(signal.SIGHUP)
    try:
        assert serving.run(RUNNING, console=Console(file=io.StringIO()), reload=lambda: RUNNING) == ""
    finally:
        signal.signal(signal.SIGHUP, before)
    assert rolled_out == [True]


async def test_front_ends_learn_what_the_cells_that_came_say_of_themselves(
    http: AsyncClient, cell: CellStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.api_service._HEARD_LATELY_S", 0.0)

    async def num_tokens() -> int:
        card = (await http.get("/v1/models")).json()["data"][0]
        return int(card["max_model_len"])

    assert await num_tokens() == cell.max_tokens == 256
    cell.max_tokens = 128
    for _ in range(100):
        if await num_tokens() == 128:
            break
        await asyncio.sleep(0.01)
    assert await num_tokens() == 128
    cell.away = True
    for _ in range(3):
        assert await num_tokens() == 128  # what was heard last
        await asyncio.sleep(0.01)


async def test_a_front_end_that_goes_asks_for_connections_to_be_closed() -> None:
    app, is_leaving = FastAPI(), False

    @app.get("/")
    async def root() -> Response:
        return PlainTextResponse("here")

    app.add_middleware(Farewell, is_leaving=lambda: is_leaving)
    async with AsyncClient(transport=ASGITransport(app=app), base_url="http://here") as client:
        assert "connection" not in (await client.get("/")).headers
        is_leaving = True
        assert (await client.get("/")).headers["connection"] == "close"
