"""Two tensor-parallel ranks, chains, and a KV pool too small for the load: still the target's own text."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.lossless import LosslessOptions, run
from cluster.placement import rank_name
from tests.system.conftest import Server, small_demo, start

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    config = small_demo(
        target__tensor_parallel=2,
        target__num_slots=400,
        policy__name="adaserve",
        policy__max_width=1,
        health__silent_s=2.0,
    )
    yield from start(config)


def test_two_ranks_return_the_targets_own_text(server: Server) -> None:
    options = LosslessOptions(server.url, server.model, num_prompts=15, max_tokens=32, drafters=())
    report = asyncio.run(run(options))
    assert report["num_unproven"] == 0
    assert any(result["receipts"]["num_verified"] > 0 for result in report["results"])


def test_requests_that_outgrow_the_pool_are_preempted_and_return_the_same_text(server: Server) -> None:
    prompts = [f"def function_{number}(value, other):\n    " for number in range(8)]

    def ask(prompt: str) -> tuple[str, int]:
        answer = server.complete(prompt, max_tokens=150, ignore_eos=True)
        return answer["choices"][0]["text"], answer["metrics"]["num_preemptions"]

    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(ask, prompts))
    assert [text for text, _ in together] == [text for text, _ in alone]
    assert sum(preemptions for _, preemptions in alone) == 0
    assert sum(preemptions for _, preemptions in together) > 0


def test_a_stopped_rank_holds_up_the_others_and_all_are_replaced(server: Server) -> None:
    prompts = [f"def function_{number}(value, other):\n    " for number in range(3)]

    def workers() -> dict[str, dict[str, Any]]:
        answer = httpx.get(f"{server.url}/debug/workers", timeout=30).json()
        return {one["process"]: one for one in answer["data"]}

    def ask(prompt: str) -> str:
        return str(server.complete(prompt, max_tokens=120, ignore_eos=True)["choices"][0]["text"])

    undisturbed = [ask(prompt) for prompt in prompts]
    before = workers()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(ask, prompt) for prompt in prompts]
        while workers()[rank_name(1)]["state"] != "busy":
            assert not any(answer.done() for answer in answers), "stopped too late to show anything"
        os.kill(before[rank_name(1)]["pid"], signal.SIGSTOP)
        assert [answer.result(timeout=90) for answer in answers] == undisturbed
    after = workers()
    assert after[rank_name(1)]["stalls"] == before[rank_name(1)]["stalls"] + 1
    for rank in range(2):
        assert after[rank_name(rank)]["pid"] != before[rank_name(rank)]["pid"]
        assert not psutil.pid_exists(before[rank_name(rank)]["pid"])
    print(f"with a stopped rank the target was ready again after {after[rank_name(1)]['recovery_s']:.1f} s")
