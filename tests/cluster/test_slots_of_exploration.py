"""What LBSS takes for slots is what drafts are made in, in the core."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.events import Action, Draft, VerifyDone
from engine.sampling_params import SamplingParams
from selector.lbss import Lbss
from tests.cluster.simulated import submit
from tests.cluster.test_core import World


class CountingWorld(World):
    """Counts calls that draft, and not those in which prompts are read."""

    num_drafts = 0

    def observe(self, actions: Sequence[Action]) -> None:
        drafts = [action.call for action in actions if isinstance(action, Draft)]
        self.num_drafts += sum(any(item.plan.depth for item in call.items) for call in drafts)


def test_slots_begin_with_the_first_draft_and_admission_ends_none() -> None:
    world = CountingWorld(1, "fixed", selector="lbss")
    selector, alpha = world.core.pool.selector, world.config.selector.alpha
    assert isinstance(selector, Lbss)
    sampling = SamplingParams(temperature=0.0, max_tokens=100)
    world.send(submit(0, world.rng, sampling=sampling))
    while not world.num_drafts:
        world.answers.sort(key=lambda answer: isinstance(answer, VerifyDone))  # the prompt is read in time
        world.handle(world.answers.pop(0))
    assert selector.slots_left == alpha, "the first slot is under way, none is over"
    for number in range(1, 5):
        world.send(submit(number, world.rng, sampling=sampling))
        assert number in {request.order for request in world.core.requests.values()}
        assert selector.slots_left == alpha
    world.drain()
    world.check_ends()
