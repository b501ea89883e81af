"""Past saturation, in simulation: our default against AdaServe's rule, and no queue that hides it."""

from __future__ import annotations

import pytest

from simulator import hardware, systems, workloads
from simulator.metrics import RunResult
from simulator.run import Options, simulate


def served(name: str, rate: float) -> RunResult:
    """Twelve seconds of the built-in mix, the same requests for every system."""
    profile = hardware.load("llama-70b-a100")
    shapes = workloads.synthetic(round(12 * rate), 1)
    requests = workloads.arrive(shapes, profile.baseline_s(), rate=rate, seed=1)
    return simulate(profile, systems.parse(name), requests, Options(seed=1))


@pytest.mark.thorough
def test_past_saturation_more_attain_and_nobody_queues_for_it() -> None:
    ours, theirs, plain = (served(name, 8.0).all for name in ("flotilla", "adaserve", "sarathi"))
    assert ours.attainment >= theirs.attainment > plain.attainment
    assert ours.throughput_tokens_s >= 0.95 * max(theirs.throughput_tokens_s, plain.throughput_tokens_s)
    assert ours.ttft_ms.mean is not None
    assert plain.ttft_ms.mean is not None
    assert ours.ttft_ms.mean <= 3.0 * plain.ttft_ms.mean
