"""Two real cells behind one front end: one is killed in the midst of answers, and no text shows it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest
from ray import serve

from cluster.config import FlotillaConfig
from cluster.members import Member
from deployments.application import APP_NAME
from deployments.directory import DIRECTORY_NAME, ask
from tests.system.conftest import Server, pass_self_tests, start, with_profile
from tests.system.front_end_loss import check_a_stream_goes_on
from tests.system.rolling_out import check_a_rollout

pytestmark = pytest.mark.system

NUM_REQUESTS, NUM_TOKENS = 10, 200


@pytest.fixture(scope="module")
def two_cells(shared_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    raw = {
        "target": {"path": "zoo:target-8x384", "num_slots": 8192},
        "drafters": [{"kind": "prompt_lookup", "name": "lookup"}],
        "pool": {"standby": 0},  # processes that nobody here would take
        "http": {"port": 0},
        # Room for a third, so that Serve asks the policy; there is no time for one to be added. Answers take
        # longer than cells have to drain.
        "scaling": {"cells": {"min": 2, "max": 3, "upscale_delay_s": 3600, "drain_timeout_s": 0.5}},
        "health": {"silent_s": 2.0, "member_silent_s": 5.0},
    }
    config = with_profile(FlotillaConfig.model_validate(raw), tmp_path_factory.mktemp("cells") / "costs.json")
    pass_self_tests(config)
    yield from start(config)


def cells() -> list[Member]:
    """The cells that serve, by the directory."""
    directory = serve.get_deployment_handle(DIRECTORY_NAME, APP_NAME)
    members = asyncio.run(ask(directory, "members", timeout_s=30))
    return [member for member in members if member.kind == "cell" and member.state == "ready"]


async def answers(
    server: Server, pid: int | None = None, sent: signal.Signals = signal.SIGKILL
) -> list[list[int]]:
    """The tokens of sampling requests sent at once; in their midst, a process may be sent a signal."""
    async with httpx.AsyncClient(timeout=120) as client:

        async def ask(number: int) -> list[int]:
            body = {
                "model": server.model,
                "prompt": f"def merge_{number}(left, right):\n",
                "max_tokens": NUM_TOKENS,
                "min_tokens": NUM_TOKENS,
                "ignore_eos": True,
                "temperature": 0.8,
                "seed": number,
                "return_token_ids": True,
            }
            response = await client.post(f"{server.url}/v1/completions", json=body)
            assert response.status_code == 200, response.text
            tokens: list[int] = response.json()["choices"][0]["token_ids"]
            return tokens

        tasks = [asyncio.create_task(ask(number)) for number in range(NUM_REQUESTS)]
        if pid is not None:
            await asyncio.sleep(0.3)
            assert not any(task.done() for task in tasks), "signalled too late to show anything"
            os.kill(pid, sent)
        return await asyncio.gather(*tasks)


def two_serving(within_s: float = 90) -> list[Member]:
    deadline = time.monotonic() + within_s
    while len(serving := cells()) < 2:
        assert time.monotonic() < deadline, serving
        time.sleep(0.1)
    return serving


@pytest.fixture(scope="module")
def undisturbed(two_cells: Server) -> list[list[int]]:
    two_serving()
    tokens = asyncio.run(answers(two_cells))
    assert all(len(one) == NUM_TOKENS for one in tokens)
    return tokens


@pytest.mark.thorough
def test_a_cell_stopped_in_the_midst_of_answers_changes_no_text_and_is_replaced(
    two_cells: Server, undisturbed: list[list[int]]
) -> None:
    stopped = two_serving()[0]
    pid = int(stopped.details["pid"])
    begun = time.monotonic()
    assert asyncio.run(answers(two_cells, pid, signal.SIGSTOP)) == undisturbed
    print(f"with a stopped cell the answers took {time.monotonic() - begun:.1f} s")
    assert httpx.get(f"{two_cells.url}/ready", timeout=10).status_code == 200
    # The directory ends it: as long as it is stopped, it does not end by itself.
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - begun < 40, "nobody ended the stopped cell"
        time.sleep(0.1)
    print(f"it was ended after {time.monotonic() - begun:.1f} s")
    assert stopped.id not in {one.id for one in two_serving()}
    print(f"and replaced after {time.monotonic() - begun:.1f} s")


def test_a_cell_killed_in_the_midst_of_answers_changes_no_text(
    two_cells: Server, undisturbed: list[list[int]]
) -> None:
    serving = two_serving()
    assert asyncio.run(answers(two_cells, int(serving[0].details["pid"]))) == undisturbed


def test_a_stream_goes_on_at_its_last_event_when_its_front_end_was_killed(two_cells: Server) -> None:
    check_a_stream_goes_on(two_cells)


@pytest.mark.thorough
def test_another_configuration_is_rolled_out_under_load(
    two_cells: Server, undisturbed: list[list[int]]
) -> None:
    """Last: there is one cell then."""
    check_a_rollout(two_cells, lambda: asyncio.run(answers(two_cells, None)), undisturbed)
