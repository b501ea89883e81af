"""What who is refused reads of those that wait."""

from __future__ import annotations

import pytest

from cluster.events import Reject, RequestArrived
from tests.cluster.simulated import submit
from tests.cluster.test_core import World


@pytest.mark.parametrize(
    ("max_waiting", "words"), [(1, "1 request is already waiting"), (2, "2 requests are already waiting")]
)
def test_one_request_waits_and_two_requests_wait(max_waiting: int, words: str) -> None:
    world = World(0, "autoregressive", max_running=1, max_waiting=max_waiting)
    for number in range(1 + max_waiting):
        world.send(submit(number, world.rng))
    actions = world.core.handle(RequestArrived(submit(9, world.rng), "a"), world.now)
    (told,) = (action.rejection.message for action in actions if isinstance(action, Reject))
    assert told.startswith(f"{words}; try again in ")
