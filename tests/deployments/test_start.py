"""What is told before and while the system starts."""

from __future__ import annotations

import io
import os
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from cluster.config import FlotillaConfig
from cluster.model_paths import model_directory
from cluster.process_environment import PROCESS_ENVIRONMENT
from deployments import preflight
from deployments.api_keys import hash_key
from deployments.demo import demo_config
from deployments.listening import shared_listener
from deployments.startup import Startup


def changed(**sections: object) -> FlotillaConfig:
    return FlotillaConfig.model_validate(demo_config().model_dump(mode="json") | sections)


def test_demo_can_start() -> None:
    preflight.check(changed(http={"port": 0}))


def test_taken_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(preflight.StartError, match=f"cannot listen on 127.0.0.1:{port}.*--port") as told:
            preflight.check(changed(http={"port": port}))
        assert str(told.value).count(str(port)) == 1


def test_taken_metrics_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(preflight.StartError, match=f"cannot listen on 127.0.0.1:{port}.*`metrics.port`"):
            preflight.check(changed(http={"port": 0}, metrics={"port": port}))


@pytest.mark.parametrize(
    ("sections", "remedy"),
    [
        ({"metrics": {"port": "SAME"}}, "metrics.port"),
        ({"metrics": {"port": "SAME", "host": "0.0.0.0"}}, "metrics.port"),
        ({"grpc": {"enabled": True, "port": "SAME"}}, "grpc.port"),
    ],
)
def test_a_port_given_twice_is_told(
    sections: dict[str, dict[str, object]], remedy: str, free_port: int
) -> None:
    """Sockets of front ends share their ports: half of the API's clients would get metrics."""
    numbered = {
        name: {field: free_port if value == "SAME" else value for field, value in section.items()}
        for name, section in sections.items()
    }
    with pytest.raises(preflight.StartError, match=f"both {free_port}; choose another `{remedy}`"):
        preflight.check(changed(http={"port": free_port}, **numbered))


def test_one_port_of_two_addresses_is_fine(free_port: int) -> None:
    preflight.check(changed(http={"port": free_port}, metrics={"port": free_port, "host": "127.0.0.2"}))


def test_a_host_that_is_no_name_is_told() -> None:
    with pytest.raises(preflight.StartError, match=r"cannot listen on not a host:1 \(.*[Nn]ame.*\)"):
        preflight.check(changed(http={"port": 1, "host": "not a host"}))


def test_what_a_server_left_behind_keeps_nobody_from_its_port() -> None:
    """Its connections are half closed for a minute, if clients do not close theirs."""
    listener = shared_listener("127.0.0.1", 0)
    listener.listen()
    port = listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)):
        with pytest.raises(preflight.StartError, match="cannot listen"):
            preflight.check(changed(http={"port": port}))
        accepted, _ = listener.accept()
        accepted.close()
        listener.close()
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))
        preflight.check(changed(http={"port": port}))


def test_tiers_of_keys_that_do_not_exist_are_told(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    hashed = hash_key("a-key-of-one's-own-that-is-long-enough")
    file.write_text(f"keys: [{{name: team, hash: '{hashed}', tiers: [nowhere, default]}}]")
    (warning,) = preflight.check(changed(http={"port": 0}, security={"keys_file": str(file)}))
    assert "team may use nowhere" in warning


def test_a_choice_of_drafters_that_are_not_there_is_told() -> None:
    """Nothing would be drafted, and nobody would know why."""
    name = demo_config().drafters[0].name

    def warnings(selector: str, *drafters: str) -> str:
        section = {"name": selector, "drafters": drafters}
        return "\n".join(preflight.check(changed(http={"port": 0}, selector=section)))

    assert "selector.drafters names smal, bg/0, but" in warnings("fixed", name, f"{name}/0", "smal", "bg/0")
    assert "selector.drafters" not in warnings("fixed", name, f"{name}/1") + warnings("flotilla", "smal")


def test_missing_profile_is_told() -> None:
    told = rf"/nowhere.json on {re.escape(platform.node())} .*flotilla profile"
    with pytest.raises(preflight.StartError, match=told):
        preflight.check(changed(profile="/nowhere.json", http={"port": 0}))


def test_zoo_names_are_directories() -> None:
    assert model_directory("zoo:target-8x384").name == "target-8x384"


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "hf download meta-llama/Llama-3.1-8B-Instruct --local-dir"),
        ("/models/nowhere", f"no such directory on this machine ({platform.node()})"),
        ("~/models/nowhere", "no such directory on this machine"),
        (str(Path(__file__).parent), "has no config.json"),
    ],
)
def test_why_there_is_no_model_is_told(path: str, told: str) -> None:
    """Other servers download what the Hub has under such a name."""
    with pytest.raises(preflight.StartError, match=f"no model at .*{re.escape(told)}"):
        preflight.check(changed(target={"path": path}, drafters=[], http={"port": 0}))


def test_serve_yaml_arguments_become_the_configuration() -> None:
    # What `serve deploy` does with `import_path: deployments.serving:build_app` and `args`.
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as build

    from deployments.serving import build_app

    arguments = {"target": {"path": "zoo:target-8x384"}, "http": {"front_ends": 3}}
    application = build(build_app, arguments)
    assert application._bound_deployment.num_replicas == 3
    with pytest.raises(ValueError, match=r"http\.front_end\b"):
        build(build_app, arguments | {"http": {"front_end": 3}})


def test_stages_are_ticked_off_once() -> None:
    console = Console(file=io.StringIO(), width=80)
    with Startup(console).running() as startup:
        for stage in ("Ray", "Target model", "Target model", "HTTP"):
            startup.enter(stage)
    assert isinstance(console.file, io.StringIO)
    lines = [line.split()[:2] for line in console.file.getvalue().splitlines() if line.strip()]
    assert lines == [["✓", "Ray"], ["✓", "Target"], ["✓", "HTTP"]]


def test_what_is_waited_for_is_told_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the log of a container or service that waits for a GPU says nothing, for ever."""
    monkeypatch.setattr("deployments.startup._LONG_S", 0.0)
    console = Console(file=io.StringIO(), width=40)
    waiting = "waiting for 1 GPU for verifier rank 0; the cluster has 4 CPU: it must grow"
    with Startup(console).running() as startup:
        for stage in ("Cell", waiting, waiting, waiting, "HTTP"):
            startup.enter(stage)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines().count(f"  {waiting} ...") == 1


def test_failed_stage_is_not_ticked_off() -> None:
    console = Console(file=io.StringIO(), width=80)
    with pytest.raises(preflight.StartError), Startup(console).running() as startup:  # noqa: PT012
        startup.enter("Ray")
        raise preflight.StartError("no")
    assert isinstance(console.file, io.StringIO)
    assert "✓" not in console.file.getvalue()


#: Threads that all hold memory of glibc's allocator; it writes how much of it there is, arena by arena.
_MANY_THREADS = """
import ctypes, sys, threading
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
everybody = threading.Barrier(20)
def hold():
    libc.malloc(ctypes.c_size_t(1000))
    everybody.wait()
threads = [threading.Thread(target=hold) for _ in range(20)]
for thread in threads: thread.start()
for thread in threads: thread.join()
file = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, file)
libc.fflush(file)
"""


def test_threads_share_what_is_freed() -> None:
    """Ray has tens of threads in each process; by default they take turns in eight arenas for each core."""
    run = subprocess.run(
        [sys.executable, "-c", _MANY_THREADS],
        env={**os.environ, **PROCESS_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert 1 <= run.stdout.count("<heap nr=") <= 2


def test_a_record_that_cannot_be_written_here_is_said_before(tmp_path: Path) -> None:
    there, gone = tmp_path / "decisions.jsonl", tmp_path / "gone" / "decisions.jsonl"
    assert preflight.check(changed(http={"port": 0}, debug={"decisions_file": str(there)})) == []
    (warning,) = preflight.check(changed(http={"port": 0}, debug={"decisions_file": str(gone)}))
    assert str(gone) in warning
    assert "cannot be written on this machine" in warning


def test_a_record_that_is_a_directory_is_said_before(tmp_path: Path) -> None:
    (warning,) = preflight.check(changed(http={"port": 0}, debug={"decisions_file": str(tmp_path)}))
    assert "cannot be written on this machine" in warning
