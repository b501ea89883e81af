"""Profiles of measured forwards beside their records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulator import hardware

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.mark.parametrize(
    ("name", "record", "most"),
    [
        ("llama-8b-h200-measured", "8b", 0.05),
        ("qwen-32b-h200-measured", "32b", 0.07),
        ("llama-70b-fp8-h200-measured", "70b-fp8", 0.03),
    ],
)
def test_they_say_what_was_measured(name: str, record: str, most: float) -> None:
    measured = json.loads((RESULTS / f"h200-forward-{record}.json").read_text())
    profile = hardware.load(name)
    assert profile.source.startswith("measured")
    assert profile.quantization == measured["quantization"]
    for one in measured["results"]:
        requests, context = one["requests"], one["requests"] * measured["context"]
        predicted = profile.cost.seconds(requests, requests * one["rows"], context)
        assert predicted == pytest.approx(one["captured"]["ms"] * 1e-3, rel=most)


def test_a_larger_model_takes_longer_and_holds_fewer_tokens() -> None:
    small, medium = (hardware.load(f"{name}-h200-measured") for name in ("llama-8b", "qwen-32b"))
    assert small.baseline_s() < medium.baseline_s()
    assert small.num_slots > medium.num_slots > 100_000
    assert small.drafters["1b"].cost.seconds(1, 1, 0) < small.cost.seconds(1, 1, 0) / 3
