"""A real cell's timeline: with two micro-batches, drafters draft while the target verifies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments import cli
from tests.system.conftest import Server, small_demo, start

NUM_REQUESTS = 8


@pytest.fixture(scope="module")
def pipelined() -> Iterator[Server]:
    yield from start(small_demo(policy__name="fixed", scheduler__micro_batches=2, debug__timeline=20_000))


def test_drafting_and_verification_overlap_in_the_trace(pipelined: Server, tmp_path: Path) -> None:
    prompts = [f"def function_{number}(first, second):\n    " for number in range(NUM_REQUESTS)]
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = list(pool.map(lambda prompt: pipelined.complete(prompt, max_tokens=48), prompts))
    alone = [pipelined.complete(prompt, max_tokens=48) for prompt in prompts[:2]]
    assert [a["choices"][0]["text"] for a in answers[:2]] == [a["choices"][0]["text"] for a in alone]

    file = tmp_path / "timeline.json"
    result = CliRunner().invoke(cli.app, ["timeline", "--url", pipelined.url, "--output", str(file)])
    assert result.exit_code == 0, result.output
    events = json.loads(file.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    verifies = [e for e in slices if names[e["tid"]] == "target" and e["name"] == "verify"]
    drafts = [e for e in slices if e["name"] == "draft"]
    assert {names[e["tid"]] for e in drafts} <= {drafter.name for drafter in pipelined.config.drafters}
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
