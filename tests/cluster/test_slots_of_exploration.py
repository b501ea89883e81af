"""What LBSS takes for slots is what drafts are made in, in the core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast
from unittest import mock

from cluster.cost_model import CostProfile
from cluster.events import Action, Draft, DrafterReady, VerifyDone
from cluster.linear_cost import LinearCost
from drafters.heads_drafter import HeadsDrafter
from engine.sampling_params import SamplingParams
from selector.lbss import Lbss
from selector.protocol import Outcome
from tests.cluster.pipelined import PipelineWorld
from tests.cluster.proposing_target import CANDIDATES, HEADS, ProposingTarget
from tests.cluster.simulated import VOCAB, SimulatedTarget, submit
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


class WatchedWorld(World):
    """Compares what the selector is told of with the draft calls that were sent."""

    def __init__(self, num_slots: int = 400) -> None:
        self.drafted: set[str] = set()
        self.told: list[tuple[Outcome, bool]] = []
        super().__init__(3, "fixed", num_slots=num_slots, selector="lbss")
        selector = self.core.pool.selector
        assert isinstance(selector, Lbss)
        inner = selector.observe

        def observe(outcomes: Sequence[Outcome]) -> None:
            for outcome in outcomes:
                if self.core.requests[outcome.request_id].num_remaining > 1:  # else there is nothing to draft
                    self.told.append((outcome, outcome.request_id in self.drafted))
                self.drafted.discard(outcome.request_id)
            inner(outcomes)

        mock.patch.object(selector, "observe", observe).start()  # of an object that ends with this one

    def observe(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Draft):
                self.drafted |= {item.request_id for item in action.call.items if item.plan.depth}


def test_a_step_in_which_a_drafter_only_read_is_no_goodput_of_it() -> None:
    """SPIN counts the rebuilding of caches as switching: its goodput is that of the drafter at work."""
    world = WatchedWorld()
    sampling = SamplingParams(temperature=0.0, max_tokens=60)
    for number in range(6):
        world.send(submit(number, world.rng, sampling=sampling))
    world.drain()
    assert sum(was_drafted for _, was_drafted in world.told) > 50
    only_read = [outcome for outcome, was_drafted in world.told if not was_drafted]
    assert only_read
    assert all(outcome.kind == "" for outcome in only_read)
    assert all(outcome.kind for outcome, was_drafted in world.told if was_drafted)


class BesideHeads(WatchedWorld):
    """One of its two drafters is the target's heads."""

    def make_target(self, num_slots: int) -> SimulatedTarget:
        return ProposingTarget(num_slots, kind="heads")

    def start_drafter(self, name: str) -> None:
        if name == "good":
            super().start_drafter(name)
            return
        heads = HeadsDrafter(num_heads=HEADS, vocab_size=VOCAB, max_tokens=200, num_candidates=CANDIDATES)
        self.drafters[name] = cast(Any, heads)
        self.handle(DrafterReady(name, heads.capabilities, 6))


def test_the_step_after_which_heads_are_first_asked_is_no_goodput_of_them() -> None:
    """Whoever moves to them has nothing proposed, and decodes one step without a draft."""
    world = BesideHeads(num_slots=2000)
    sampling = SamplingParams(temperature=0.0, max_tokens=60)
    for number in range(6):
        world.send(submit(number, world.rng, sampling=sampling))
    world.drain()
    world.check_ends()
    kinds = [outcome.kind for outcome, was_drafted in world.told if was_drafted]
    assert min(kinds.count("good"), kinds.count("poor")) > 10
    undrafted = [outcome for outcome, was_drafted in world.told if not was_drafted]
    assert undrafted
    assert all(outcome.kind == "" for outcome in undrafted)


def test_who_waits_for_a_slower_drafter_of_others_is_told_of_its_own_seconds() -> None:
    """SPIN's g(i,j) is of a request on a drafter: how else is its bandit to learn that one is slow?"""
    profile = CostProfile(
        target=LinearCost(delta=5e-3),
        drafters={"quick": LinearCost(delta=0.5e-3), "slow": LinearCost(delta=10e-3)},
    )
    policy: dict[str, object] = {"name": "fixed", "fixed_depth": 4}
    world = PipelineWorld({}, policy, selector="lbss", profile=profile, num_cores=2)
    told: list[Outcome] = []
    with mock.patch.object(world.core.pool.selector, "observe", told.extend):
        for number in range(8):
            world.submit(number, tokens=120)
        world.run()
    whole = [one for one in told if one.num_drafted == 4]  # less is drafted where a request ends
    seconds = {kind: [one.seconds for one in whole if one.kind == kind] for kind in ("quick", "slow")}
    assert min(map(len, seconds.values())) > 20
    assert min(seconds["slow"]) > 0.04
    assert max(seconds["quick"]) < 0.02
