"""The scheduler core with the real verifier, and fewer KV slots than are wanted: no token is lost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.events import Action, Cancelled, Emit, Event
from cluster.invariants import check_at_rest
from cluster.requests import GRAMMAR
from cluster.stream_messages import Objective, Receipt, Speculation, Submit
from engine.constraint import Constraint
from engine.sampling_params import SamplingParams
from tests.cluster import test_core
from tests.cluster.simulated import SimulatedTarget
from tests.cluster.test_core import World
from tests.examples import examples
from tests.verifier import target as tiny
from tests.verifier.grammars import make_grammars
from tests.verifier.target import VOCAB, Target, spec_of
from verifier.messages import VerifyCall, VerifyResult
from verifier.verifier import Verifier

MAX_TOKENS = 800

with mock.patch.object(tiny, "MAX_TOKENS", MAX_TOKENS):
    TARGET = Target()
GRAMMARS = make_grammars()


class RealTarget(SimulatedTarget):
    """With a model: chunks are cut to the slots there are, and prompts that were read are found again."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, MAX_TOKENS, VOCAB)
        self.verifier = Verifier(TARGET.runner(num_slots), grammars=GRAMMARS)

    def step(self, call: VerifyCall) -> VerifyResult:
        return self.verifier.step(call)


class FullPool(World):
    """Requests of a real target, with their receipts."""

    def __init__(self, seed: int, policy: str, num_slots: int, **scheduler: object) -> None:
        self.receipts: dict[str, Receipt] = {}
        super().__init__(seed, policy, num_slots=num_slots, **scheduler)

    def observe(self, actions: Sequence[Action]) -> None:
        for event in [one for action in actions if isinstance(action, Emit) for one in action.events]:
            if event.receipt is not None:
                self.receipts[event.request_id] = event.receipt

    def make_target(self, num_slots: int) -> RealTarget:
        return RealTarget(num_slots)

    def expected(self, request: Submit) -> list[int]:
        output, _ = TARGET.decode(spec_of(request.request_id, list(request.prompt), request.sampling))
        return output[: self.core.max_model_tokens - len(request.prompt)]  # the pool may be the shorter end

    def ask(self, name: str, num_prompt: int, num_output: int, priority: int = 0) -> None:
        """A request of a prompt of its own."""
        rng = random.Random(name)
        prompt = [rng.randrange(VOCAB) for _ in range(num_prompt)]
        logprobs = 0 if num_prompt > 40 else None
        sampling = SamplingParams(temperature=0.0, max_tokens=num_output, prompt_logprobs=logprobs)
        self.send(Submit(request_id=name, prompt=prompt, sampling=sampling, priority=priority))

    def check(self, left: set[str]) -> None:
        self.check_ends(frozenset(left))
        check_at_rest(self.core)
        for name, request in self.submitted.items():
            if request.sampling.prompt_logprobs is not None and name not in left:
                assert len(self.prompt_logprobs[name]) == len(request.prompt) - 1
        target = self.target
        assert isinstance(target, RealTarget)
        target.verifier.forget_all(with_prefixes=True)
        assert target.verifier.free_slots == target.num_slots


@pytest.mark.thorough
@examples(4)
@given(
    seed=st.integers(0, 2**32),
    num_slots=st.integers(260, 340),
    prefill_chunk=st.sampled_from([17, 18, 20, 24]),
    policy=st.sampled_from(["autoregressive", "flotilla"]),
)
def test_long_prompts_in_parts_while_clients_leave(
    seed: int, num_slots: int, prefill_chunk: int, policy: str
) -> None:
    world = FullPool(seed, policy, num_slots=num_slots, prefill_chunk=prefill_chunk)
    rng, left = random.Random(seed), set()
    for number in range(100):
        chance = rng.random()
        if chance < 0.12:
            is_long = rng.random() < 0.3
            num_prompt = rng.randrange(60, 200) if is_long else rng.randrange(1, 30)
            world.ask(f"r{number}", num_prompt, rng.choice([6, 20, 60]), priority=-is_long)
        elif chance < 0.2 and world.core.running:
            name = rng.choice(sorted(world.core.running))
            left.add(name)
            world.handle(Cancelled(name))
        else:
            world.answer_one()
    world.drain()
    world.check(left)


@pytest.mark.parametrize(
    ("num_slots", "num_others", "num_leaving", "prefill_chunk"),
    [
        # The end of the prompt has one slot too few, and its decoding is sent before that is known.
        (586, 3, 1, 24),
        # A part in the midst of it has none, and the next part is sent before that is known.
        (746, 8, 8, 18),
    ],
)
def test_others_leave_when_a_prompt_has_too_few_slots(
    num_slots: int, num_others: int, num_leaving: int, prefill_chunk: int
) -> None:
    world = FullPool(1, "autoregressive", num_slots=num_slots, prefill_chunk=prefill_chunk)
    others = [f"q{number}" for number in range(num_others)]
    for name in others:
        world.ask(name, 10, 90)
    for _ in range(6):
        world.answer_one()
    world.ask("long", 480, 10, priority=-1 if num_others > 3 else 0)
    left: set[str] = set()
    while world.answer_one():
        sent = world.core.verify_calls.all_outstanding
        is_short = len(sent) == 1 and sent[0].num_tokens > world.core.free_slots
        if is_short and "long" in sent[0].prefilling and not left:
            left = set(others[:num_leaving])
            for name in sorted(left):
                world.handle(Cancelled(name))
    assert left, "slots were never short"
    world.check(left)


def test_tokens_that_a_grammar_forces_end_where_the_pool_does() -> None:
    """They may reach beyond the longest sequence, where the target ends without speculation."""
    output = {}
    for mode in ("off", "auto"):
        world = FullPool(1, "fixed", num_slots=90)
        sampling = SamplingParams(
            temperature=0.0, max_tokens=120, constraint=Constraint(kind="regex", text="x{100}")
        )
        speculation = Speculation(mode=mode)
        world.send(Submit(request_id=mode, prompt=[5] * 6, sampling=sampling, speculation=speculation))
        while world.answer_one():
            pass
        assert world.reason[mode] == "length"
        output[mode] = world.output[mode]
    assert output["auto"] == output["off"]
    assert len(output["off"]) == world.core.max_model_tokens - 6
    assert world.core.totals.verified_by_drafter[GRAMMAR] > 8
    # Those beyond count neither as output nor as accepted.
    totals, receipt = world.core.totals, world.receipts["auto"]
    assert totals.committed_tokens == len(output["auto"])
    assert totals.accepted_tokens == receipt.num_accepted == sum(receipt.acceptance_by_depth)
    # The last step, which they end, has no token of the target's own.
    assert receipt.num_accepted == len(output["auto"]) - receipt.num_steps + 1


class SharingPool(FullPool):
    """Where requests share prompts, what they hold together is more than there is."""

    def handle(self, event: Event) -> None:
        with mock.patch.object(test_core, "check_invariants"):
            super().handle(event)
        assert 0 <= self.core.free_slots <= self.target.num_slots


def test_a_prompt_that_others_share_is_not_freed_with_each_of_them() -> None:
    """The background gives way, and seemed to leave more slots than there are: a use below zero was told."""
    world = SharingPool(1, "autoregressive", num_slots=1000, prefill_chunk=64, max_running=8)
    sampling = SamplingParams(temperature=0.0, max_tokens=90)
    shared = [3 + i % 40 for i in range(300)]
    for number in range(8):
        world.send(Submit(request_id=f"b{number}", prompt=shared, sampling=sampling, priority=3))
    while len(world.core.running) < 8:
        world.answer_one()
    for number in range(8):
        objective, prompt = Objective(tpot_ms=1000.0), [number + 1, *shared[:150]]
        world.send(Submit(request_id=f"f{number}", prompt=prompt, sampling=sampling, objective=objective))
    world.drain()
    assert world.core.totals.preemptions >= 7
    world.check(set())
