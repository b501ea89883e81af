"""A cell that is being removed: what waits is given back at once, what runs ends, or is given back too."""

from __future__ import annotations

import pytest

from cluster.events import CellDraining
from cluster.stream_messages import Submit
from tests.cluster.simulated import expected_output, submit
from tests.cluster.test_core import World


def loaded(seed: int) -> World:
    world = World(seed, "flotilla")
    for number in range(30):
        world.send(submit(number, world.rng))
    for _ in range(12):
        world.answer_one()
    assert world.core.waiting
    assert world.core.running
    return world


@pytest.mark.parametrize("seed", range(4))
def test_what_waits_is_given_back_and_what_runs_ends(seed: int) -> None:
    world = loaded(seed)
    waiting = {request.request_id for request in world.core.waiting}
    world.handle(CellDraining())
    assert set(world.rejected) == waiting
    assert set(world.rejected.values()) == {"draining"}
    world.send(submit(99, world.rng))
    assert world.rejected["r99"] == "draining"
    world.drain()
    world.check_ends()


@pytest.mark.parametrize("seed", range(4))
def test_another_cell_goes_on_with_what_was_given_back(seed: int) -> None:
    world = loaded(seed)
    world.handle(CellDraining(with_running=True))
    world.drain()
    world.check_ends()
    assert world.rejected
    assert any(world.output.get(request_id) for request_id in world.rejected), "nobody had begun"
    other = World(seed + 100, "flotilla")
    for request_id in world.rejected:
        first = world.submitted[request_id]
        output = list(world.output.get(request_id, []))
        other.output[request_id] = list(output)
        other.send(Submit(request_id=request_id, prompt=first.prompt, sampling=first.sampling, output=output))
    other.drain()
    for request_id in world.rejected:
        whole = expected_output(world.submitted[request_id], other.core.max_model_tokens)
        assert other.output[request_id] == whole
