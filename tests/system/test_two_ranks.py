"""Two tensor-parallel ranks, chains, and a KV pool too small for the load: still the target's own text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.lossless import LosslessOptions, run
from tests.system.conftest import Server, small_demo, start

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    config = small_demo(
        target__tensor_parallel=2, target__num_slots=400, policy__name="adaserve", policy__max_width=1
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
