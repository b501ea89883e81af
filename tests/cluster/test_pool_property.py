"""Random pools whose drafters come, go and drain: no request is lost, and none drafts where it must not."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from cluster.events import Action, Cancelled, Draft, DraftDone, DrafterDraining, DrafterReady, Drained, Tick
from cluster.requests import Request, State
from selector.registry import SELECTORS
from tests.cluster.rotating import Rotate
from tests.cluster.simulated import SimulatedDrafter, submit
from tests.cluster.test_core import World
from tests.examples import examples

ACCURACY = {"good": 0.9, "fair": 0.6, "poor": 0.2}
IN_STEP = (State.DRAFTING, State.DRAFTED, State.VERIFYING)


class PoolWorld(World):
    """Drafters of several kinds and instances; after every event it is checked who serves whom."""

    def __init__(self, seed: int, policy: str, selector: str, micro_batches: int) -> None:
        self.draining: dict[str, dict[str, int]] = {}
        self.gone: set[str] = set()
        self.drained: set[str] = set()
        self.capacity: dict[str, int] = {}
        self.num_started = 0
        super().__init__(seed, policy, micro_batches, selector=selector)

    def start_drafter(self, name: str) -> None:
        """An instance of the kind `name`."""
        self.num_started += 1
        instance = f"{name}/{self.num_started}"
        self.drafters[instance] = SimulatedDrafter(ACCURACY[name], self.rng)
        self.capacity[instance] = self.rng.randint(1, 5)
        capabilities = self.drafters[instance].capabilities
        self.handle(DrafterReady(instance, capabilities, self.capacity[instance], kind=name, size=9))

    def lose_drafter(self, name: str) -> None:
        self.gone.add(name)
        self.draining.pop(name, None)
        self.lose(name)

    def drain_drafter(self, name: str) -> None:
        # Who is in the middle of a step may finish it.
        in_step = [r for r in self.core.requests.values() if r.drafter == name and r.state in IN_STEP]
        self.draining[name] = {request.request_id: request.num_steps for request in in_step}
        self.handle(DrafterDraining(name))

    def observe(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Drained(name):
                    assert name in self.draining
                    assert name not in self.drained
                    self.drained.add(name)
                    assert not any(isinstance(a, DraftDone) and a.drafter == name for a in self.answers)
                case Draft(name, call):
                    assert name not in self.gone
                    assert name not in self.draining, "a draining drafter was called"
                    assert len({item.request_id for item in call.items}) == len(call.items)
        for request in self.core.requests.values():
            self.check_drafter(request)
        for name, drafter in self.core.pool.drafters.items():
            assert len(drafter.served) <= self.capacity[name]
            mine = {r.request_id for r in self.core.requests.values() if r.drafter == name}
            assert drafter.served == mine

    def check_drafter(self, request: Request) -> None:
        if not request.drafter:
            return
        assert request.drafter in self.core.pool.drafters, "assigned to a drafter that is gone"
        if request.drafter in self.draining:
            left = self.draining[request.drafter]
            assert request.num_steps <= left[request.request_id] + 1, "still there after the step"


@examples(120)
@given(
    seed=st.integers(0, 2**32),
    selector=st.sampled_from([*SELECTORS, "rotate"]),
    policy=st.sampled_from(["fixed", "flotilla", "adaserve", "smartspec", "autoregressive"]),
    micro_batches=st.integers(1, 3),
    data=st.data(),
)
def test_no_request_is_lost_while_drafters_come_go_and_drain(
    seed: int, selector: str, policy: str, micro_batches: int, data: st.DataObject
) -> None:
    world = PoolWorld(seed, policy, "fixed" if selector == "rotate" else selector, micro_batches)
    if selector == "rotate":
        world.core.pool.selector = Rotate(every=2)
    events = [
        "send",
        "send",
        "answer",
        "answer",
        "answer",
        "answer",
        "start",
        "lose",
        "drain",
        "tick",
        "cancel",
    ]
    cancelled: set[str] = set()
    for event in data.draw(st.lists(st.sampled_from(events), min_size=10, max_size=80)):
        alive = sorted(set(world.drafters) - world.gone)
        match event:
            case "send":
                world.send(submit(len(world.submitted), world.rng))
            case "answer":
                world.answer_one()
            case "start":
                world.start_drafter(world.rng.choice(sorted(ACCURACY)))
            case "lose" if alive:
                world.lose_drafter(world.rng.choice(alive))
            case "drain" if set(alive) - world.draining.keys():
                world.drain_drafter(world.rng.choice(sorted(set(alive) - world.draining.keys())))
            case "cancel" if world.core.requests:
                cancelled.add(world.rng.choice(sorted(world.core.requests)))
                world.handle(Cancelled(max(cancelled)))
                cancelled = {one for one in cancelled if world.reason.get(one) == "cancelled"}
            case "tick":
                world.now += world.rng.choice([0.1, 3.0])
                world.handle(Tick())
    world.drain()
    world.check_ends(frozenset(cancelled))
    assert world.draining.keys() <= world.drained, "a drafter that serves nobody was not said to be drained"
    assert not world.core.pool.drafters or all(not d.served for d in world.core.pool.drafters.values())
