"""Small simulated runs for tests."""

from __future__ import annotations

import msgspec

from cluster.stream_messages import Objective
from simulator import hardware, workloads
from simulator.hardware import HardwareProfile
from simulator.noise import key_of
from simulator.workloads import SimRequest


def small_profile(**changes: object) -> HardwareProfile:
    """Llama-3.1-8B on an A100, with changes."""
    return msgspec.structs.replace(hardware.load("llama-8b-a100"), **changes)


def some_requests(count: int = 40, rate: float = 8.0, seed: int = 0) -> list[SimRequest]:
    """Of the built-in mix, with short answers."""
    return workloads.arrive(workloads.synthetic(count, seed, fixed_output=48), 0.013, rate=rate, seed=seed)


def one_request(number: int, num_output: int = 64, kind: str = "code") -> SimRequest:
    """A request by itself."""
    return SimRequest(
        request_id=f"r{number}",
        kind=kind,
        arrival_s=0.01 * number,
        num_prompt=30,
        num_output=num_output,
        objective=Objective(tpot_ms=30.0),
        seed=key_of(7, number),
    )
