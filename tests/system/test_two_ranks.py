"""Two tensor-parallel ranks, chains, two micro-batches, a KV pool too small: still the target's own text.

With a pool that suffices test_pool.py shows it, too.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from cluster.placement import rank_name
from deployments import cli
from tests.own_processes import own_processes
from tests.system.conftest import Server, small_demo, start, with_profile

pytestmark = [pytest.mark.system, pytest.mark.thorough]


# Together they need more slots than there are; two at a time have plenty.
PROMPTS = [f"def function_{number}(value, other):\n    " for number in range(4)]


@pytest.fixture(scope="module")
def server(shared_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # Each further drafter is a process to start; none of these tests is about which drafter drafts.
    config = small_demo(
        drafters=("general-2x192", "prompt-lookup"),
        target__tensor_parallel=2,
        target__num_slots=256,
        policy__name="adaserve",
        policy__max_width=1,
        scheduler__micro_batches=2,
        pool__standby=0,
        debug__timeline=20_000,
        health__silent_s=2.0,
        health__orphan_s=240.0,  # a new cell may take a minute where tests run beside
    )
    yield from start(with_profile(config, tmp_path_factory.mktemp("ranks") / "costs.json"))


def ask(server: Server, prompt: str) -> tuple[str, int]:
    """The text of a long answer, and how often it was preempted."""
    answer = server.complete(prompt, max_tokens=80, ignore_eos=True)
    return answer["choices"][0]["text"], answer["metrics"]["num_preemptions"]


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[tuple[str, int]]:
    """What each prompt's request gives when there is room; two fit."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda prompt: ask(server, prompt), PROMPTS))


def test_requests_that_outgrow_the_pool_are_preempted_and_return_the_same_text(
    server: Server, undisturbed: list[tuple[str, int]]
) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda prompt: ask(server, prompt), PROMPTS))
    assert [text for text, _ in together] == [text for text, _ in undisturbed]
    assert sum(preemptions for _, preemptions in undisturbed) == 0
    assert sum(preemptions for _, preemptions in together) > 0


def workers(server: Server) -> dict[str, dict[str, Any]]:
    answer = httpx.get(f"{server.url}/debug/workers", timeout=30).json()
    return {one["process"]: one for one in answer["data"]}


def trace(server: Server, file: Path) -> list[dict[str, Any]]:
    """The events of the timeline so far."""
    result = CliRunner().invoke(cli.app, ["timeline", "--url", server.url, "--output", str(file)])
    assert result.exit_code == 0, result.output
    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events


def test_drafting_and_verification_overlap_in_the_trace(server: Server, tmp_path: Path) -> None:
    earlier = [e["ts"] for e in trace(server, tmp_path / "earlier.json") if e["ph"] == "X"]
    prompts = [f"def overlap_{number}(first, second):\n    " for number in range(8)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: server.complete(prompt, max_tokens=48), prompts))
    assert all(answer["choices"][0]["text"] for answer in answers)

    events = trace(server, tmp_path / "timeline.json")
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X" and e["ts"] > max(earlier, default=0.0)]
    verifies = [e for e in slices if names[e["tid"]] == "target" and e["name"] == "verify"]
    drafts = [e for e in slices if e["name"] == "draft"]
    assert {names[e["tid"]] for e in drafts} <= {drafter.name for drafter in server.config.drafters}
    for track in {e["tid"] for e in verifies + drafts}:
        own = sorted((e for e in slices if e["tid"] == track), key=lambda e: e["ts"])
        for before, after in pairwise(own):
            assert before["ts"] + before["dur"] <= after["ts"] + 1.0
    assert {batch for e in verifies for batch in e["args"]["micro_batches"]} == {0, 1}
    overlapping = [
        d
        for d in drafts
        if any(d["ts"] < v["ts"] + v["dur"] and v["ts"] < d["ts"] + d["dur"] for v in verifies)
    ]
    assert len(overlapping) > len(drafts) / 4
    print(f"{len(overlapping)} of {len(drafts)} drafts overlap one of {len(verifies)} verifications")


def test_both_ranks_of_a_cell_that_was_killed_go_on_with_the_next(
    server: Server, undisturbed: list[tuple[str, int]]
) -> None:
    before = {one["process"]: one["pid"] for one in workers(server).values()}
    (cell,) = own_processes("ServeReplica:flotilla:Cell")
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(ask, server, prompt) for prompt in PROMPTS[:3]]
        while workers(server)[rank_name(1)]["state"] != "busy":
            assert not any(answer.done() for answer in answers), "killed too late to show anything"
        os.kill(cell, signal.SIGKILL)
        told = [answer.result(timeout=90)[0] for answer in answers]
    assert told == [text for text, _ in undisturbed[:3]]
    assert {one["process"]: one["pid"] for one in workers(server).values()} == before


def test_a_stopped_rank_holds_up_the_others_and_all_are_replaced(
    server: Server, undisturbed: list[tuple[str, int]]
) -> None:
    """Last: the target is started again."""
    before = workers(server)
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(ask, server, prompt) for prompt in PROMPTS[:2]]
        while workers(server)[rank_name(1)]["state"] != "busy":
            assert not any(answer.done() for answer in answers), "stopped too late to show anything"
        os.kill(before[rank_name(1)]["pid"], signal.SIGSTOP)
        told = [answer.result(timeout=90)[0] for answer in answers]
    assert told == [text for text, _ in undisturbed[:2]]
    after = workers(server)
    assert after[rank_name(1)]["stalls"] == before[rank_name(1)]["stalls"] + 1
    for rank in range(2):
        assert after[rank_name(rank)]["pid"] != before[rank_name(rank)]["pid"]
        assert not psutil.pid_exists(before[rank_name(rank)]["pid"])
    print(f"with a stopped rank the target was ready again after {after[rank_name(1)]['recovery_s']:.1f} s")
