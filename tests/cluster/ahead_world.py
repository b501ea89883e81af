"""A world that watches which steps are sent ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st

from cluster.events import Action, Cancelled, Verify, VerifyDone
from cluster.invariants import check_at_rest
from cluster.stream_messages import Objective, Speculation, Submit
from engine.sampling_params import SamplingParams
from tests.cluster.simulated import submit
from tests.cluster.test_core import World
from verifier.messages import VerifyCall

LONG = SamplingParams(temperature=0.0, max_tokens=40)


class AheadWorld(World):
    """Keeps the calls to the target, and the states of its requests after each event."""

    def __init__(
        self,
        seed: int,
        policy: str | dict[str, object] = "autoregressive",
        num_slots: int = 2000,
        **scheduler: Any,
    ) -> None:
        self.calls: list[VerifyCall] = []
        super().__init__(seed, policy, num_slots=num_slots, **scheduler)

    def observe(self, actions: Sequence[Action]) -> None:
        self.calls += [action.call for action in actions if isinstance(action, Verify)]

    @property
    def num_at_target(self) -> int:
        return sum(isinstance(answer, VerifyDone) for answer in self.answers)

    def begin(self, *names: str, sampling: SamplingParams = LONG, **changes: Any) -> None:
        """Requests of ten tokens, until a step of all of them is at the target."""
        for number, name in enumerate(names):
            self.send(Submit(request_id=name, prompt=[3 + number] * 10, sampling=sampling, **changes))
        while not self.calls or ids(self.calls[-1]) != set(names):
            assert self.answer_one()

    def send_again(self, name: str) -> None:
        """A request of an id that was there before, told to nobody yet."""
        self.output.pop(name, None)
        self.reason.pop(name, None)
        self.send(self.submitted[name])


def ids(call: VerifyCall) -> set[str]:
    return {item.request_id for item in call.verify}


def is_ahead(call: VerifyCall) -> bool:
    """Whether its requests go on from tokens that only the target knew when it was sent."""
    return bool(call.verify) and all(item.tree is None for item in call.verify)


def ends(num_tokens: int, **changes: Any) -> SamplingParams:
    return msgspec.structs.replace(LONG, max_tokens=num_tokens, **changes)


def interrupt(
    world: AheadWorld,
    data: st.DataObject,
    *,
    share_off: float,
    share_background: float = 0.0,
    others: Mapping[str, Callable[[], None]] | None = None,
) -> None:
    """Requests come, answers arrive, and what may happen in between does: each gets its text nevertheless.

    Args:
        world: where.
        data: draws what happens.
        share_off: of the requests that must not be drafted for.
        share_background: of the requests in the background of others, which then have objectives.
        others: what may happen besides, by name.
    """
    others = others or {}
    cancelled: set[str] = set()
    number = 0
    for _ in range(data.draw(st.integers(10, 60))):
        kinds = ["send", "answer", "answer", "answer", "cancel", "again", "withhold", "lose", *others]
        kind = data.draw(st.sampled_from(kinds))
        live = sorted(world.core.requests)
        if kind == "send":
            wish = Speculation(mode="off") if world.rng.random() < share_off else Speculation()
            terms: dict[str, object] = {}
            if share_background and world.rng.random() < share_background:
                terms = {"priority": 5}
            elif share_background:
                terms = {"objective": Objective(tpot_ms=world.rng.choice([9.0, 12.0, 30.0]))}
            world.send(submit(number, world.rng, speculation=wish, **terms))
            number += 1
        elif kind == "cancel" and live:
            victim = world.rng.choice(live)
            cancelled.add(victim)
            world.handle(Cancelled(victim))
        elif kind == "again" and live:
            victim = world.rng.choice(live)
            world.handle(Cancelled(victim))
            world.send_again(victim)
        elif kind == "withhold":
            before, world.target.num_slots = world.target.num_slots, 0
            world.answer_one()
            world.target.num_slots = before
        elif kind == "lose":
            world.lose("verifier")
            world.start_target()
        elif kind in others:
            others[kind]()
        else:
            world.answer_one()
    world.drain()
    world.check_ends(frozenset(cancelled))
    check_at_rest(world.core)
