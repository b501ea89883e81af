"""What is told before and while the system starts."""

from __future__ import annotations

import io
import socket

import pytest
from rich.console import Console

from cluster.config import FlotillaConfig
from deployments import preflight
from deployments.demo import demo_config
from deployments.model_paths import model_directory, served_name
from deployments.startup import Startup


def changed(**sections: object) -> FlotillaConfig:
    return FlotillaConfig.model_validate(demo_config().model_dump(mode="json") | sections)


def test_demo_can_start() -> None:
    preflight.check(changed(http={"port": 0}))


def test_taken_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(preflight.StartError, match=f"cannot listen on 127.0.0.1:{port}.*--port"):
            preflight.check(changed(http={"port": port}))


def test_missing_profile_is_told() -> None:
    with pytest.raises(preflight.StartError, match="flotilla profile"):
        preflight.check(changed(profile="/nowhere.json", http={"port": 0}))


def test_model_names() -> None:
    assert served_name("zoo:target-8x384") == model_directory("zoo:target-8x384").name == "target-8x384"
    assert served_name("/models/big/") == "big"


def test_stages_are_ticked_off_once() -> None:
    console = Console(file=io.StringIO(), width=80)
    with Startup(console).running() as startup:
        for stage in ("Ray", "Target model", "Target model", "HTTP"):
            startup.enter(stage)
    assert isinstance(console.file, io.StringIO)
    lines = [line.split()[:2] for line in console.file.getvalue().splitlines() if line.strip()]
    assert lines == [["✓", "Ray"], ["✓", "Target"], ["✓", "HTTP"]]


def test_failed_stage_is_not_ticked_off() -> None:
    console = Console(file=io.StringIO(), width=80)
    with pytest.raises(preflight.StartError), Startup(console).running() as startup:  # noqa: PT012
        startup.enter("Ray")
        raise preflight.StartError("no")
    assert isinstance(console.file, io.StringIO)
    assert "✓" not in console.file.getvalue()
