"""Requests that nobody is in a hurry for."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.stream_messages import Objective
from simulator.noise import key_of
from simulator.workloads import Shape, SimRequest

#: As a tier for batches has it.
PRIORITY = 10
# Stream of their texts.
_TEXTS = 201


def in_background(shapes: Sequence[Shape], seed: int) -> list[SimRequest]:
    """Requests of these lengths that are there from the start, without objectives and the least urgent.

    Args:
        shapes: class and lengths of each.
        seed: of their texts and drafts.
    """
    return [
        SimRequest(
            request_id=f"background-{index}",
            kind=shape.kind,
            arrival_s=0.0,
            num_prompt=shape.num_prompt,
            num_output=shape.num_output,
            objective=Objective(),
            seed=key_of(seed, _TEXTS, index) >> 1,
            priority=PRIORITY,
        )
        for index, shape in enumerate(shapes)
    ]
