"""Prompts with a common beginning take its memory once, also where it is reckoned who may begin."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import takewhile

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.admission import GROWTH_RESERVE, Room
from cluster.batching.registry import BATCHING_RULES
from cluster.config import FlotillaConfig
from cluster.events import Event, RequestArrived
from cluster.local import LocalEngine
from cluster.requests import Request, State
from cluster.shared_prompts import COMPLETE, num_shared
from cluster.stream_messages import Objective, Submit, Tenant
from engine.prefix_cache import BLOCK_TOKENS
from engine.sampling_params import SamplingParams
from tests.cluster.simulated import VOCAB, submit
from tests.cluster.small_family import small_family
from tests.cluster.test_core import World

COMMON = [(31 * i) % 4000 + 4 for i in range(160)]
NUM_SLOTS = 320
NUM_REQUESTS = 4


def submitted(number: int, prompt: Sequence[int], **changes: object) -> Submit:
    sampling = SamplingParams(temperature=0.0, max_tokens=12)
    submit = Submit(request_id=f"r{number}", prompt=list(prompt), sampling=sampling)
    return msgspec.structs.replace(submit, **changes)


def request(number: int, prompt: Sequence[int], state: State, **changes: object) -> Request:
    made = Request(submitted(number, prompt, **changes), "client", 0.0, number)
    made.state = state
    made.num_computed = made.num_tokens - 1 if state in COMPLETE else 0
    return made


prompts = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=70)


@given(prompts, st.lists(st.tuples(prompts, st.integers(0, 60), st.sampled_from(list(State))), max_size=4))
def test_what_is_shared_is_the_longest_common_beginning_in_blocks(
    mine: list[int], others: list[tuple[list[int], int, State]]
) -> None:
    running = [
        request(number, [*mine[:kept], *theirs], state)
        for number, (theirs, kept, state) in enumerate(others, start=1)
    ]
    lengths = [
        len(list(takewhile(lambda pair: pair[0] == pair[1], zip(mine, one.submit.prompt, strict=False))))
        for one in running
        if one.state in COMPLETE
    ]
    expected = min(max(lengths, default=0) // BLOCK_TOKENS * BLOCK_TOKENS, len(mine) - 1)
    assert num_shared(request(0, mine, State.WAITING), running) == expected


def test_nothing_is_shared_across_adapters_and_salts_or_by_who_wants_the_prompt_scored() -> None:
    here = [request(1, COMMON, State.READY)]
    assert num_shared(request(2, COMMON, State.WAITING), here) == 160 - 1
    assert num_shared(request(2, COMMON, State.WAITING, adapter="pirate"), here) == 0
    assert num_shared(request(2, COMMON, State.WAITING, cache_salt="mine"), here) == 0
    scored = SamplingParams(max_tokens=12, prompt_logprobs=1)
    assert num_shared(request(2, COMMON, State.WAITING, sampling=scored), here) == 0
    assert num_shared(here[0], here) == 0  # with itself it shares nothing


def test_who_gives_way_gives_back_what_nobody_else_has() -> None:
    sharing = [request(number, [*COMMON, number], State.READY) for number in range(2)]
    other = request(3, range(10, 210), State.READY)
    room = Room.beside([*sharing, other], 100, 8, shares_prompts=True)
    slots = room.slots
    room.give_back(sharing[0])  # the other one has all that it has, but for the last token, never computed
    assert room.slots == slots + GROWTH_RESERVE
    room.give_back(sharing[1])
    assert room.slots == slots + 160 + 2 * GROWTH_RESERVE
    room.give_back(other)
    assert room.slots == slots + 160 + 199 + 3 * GROWTH_RESERVE
    assert room.copy() == room


def test_without_sharing_all_of_a_prompt_is_counted() -> None:
    here, newcomer = [request(1, COMMON, State.READY)], request(2, COMMON, State.WAITING)
    assert Room.beside(here, 100, 8, shares_prompts=True).takes(newcomer)
    assert not Room.beside(here, 100, 8).takes(newcomer)
    # Whoever has begun none of it yet is still counted for the little that it will take.
    here.append(request(3, COMMON, State.PREFILLING))
    assert Room.beside(here, 100, 8, shares_prompts=True).takes(newcomer)


@pytest.mark.parametrize("rule", sorted(BATCHING_RULES))
@pytest.mark.parametrize("seed", range(6))
def test_all_are_served_where_less_is_shared_than_was_reckoned_with(seed: int, rule: str) -> None:
    """As if what is shared were always gone when a prompt is begun: this world's target shares nothing."""
    rng = random.Random(seed)
    world = World(seed, "flotilla", num_slots=rng.choice([130, 170, 230]), batching=rule)
    beginnings = [[rng.randrange(VOCAB) for _ in range(rng.choice([32, 64]))] for _ in range(2)]
    for number in range(14):
        ending = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))]
        changes: dict[str, object] = {"prompt": [*rng.choice(beginnings), *ending]}
        if rng.random() < 0.5:
            changes["objective"] = Objective(tpot_ms=5.0, ttft_ms=100.0)
        world.send(submit(number, rng, tenant=Tenant(rng.choice("ab")), **changes))
        for _ in range(rng.randint(0, 12)):
            if world.answers:
                world.answer_one()
    world.drain()
    assert world.core.is_idle
    assert not world.rejected
    for request_id, request in world.submitted.items():
        assert world.output[request_id] == world.expected(request)


class Watched(LocalEngine):
    """Keeps how many ran at once, at most."""

    most_running = 0

    def _handle(self, event: Event) -> None:
        if isinstance(event, RequestArrived) and not self.core.requests:
            self.most_running = 0
        super()._handle(event)
        self.most_running = max(self.most_running, len(self.core.running))


@pytest.fixture(scope="module")
def engine() -> Watched:
    raw = small_family()
    raw["target"]["num_slots"] = NUM_SLOTS
    return Watched(FlotillaConfig.model_validate(raw))


def use(engine: Watched, **changes: object) -> None:
    engine.target.calls.forget_all(with_prefixes=True)
    engine.use_policy(FlotillaConfig.model_validate(engine.config.model_dump() | changes))


@pytest.fixture(scope="module")
def expected(engine: Watched) -> dict[str, list[int]]:
    """Every request by itself."""
    use(engine, policy={"name": "autoregressive"})
    return {
        one.request_id: engine.generate([one])[one.request_id].tokens
        for one in (submitted(number, [*COMMON, 5 + number]) for number in range(NUM_REQUESTS))
    }


@pytest.mark.parametrize("keys", [1, 2])
@pytest.mark.parametrize("rule", sorted(BATCHING_RULES))
def test_memory_that_holds_one_prompt_holds_many_that_share_it(
    engine: Watched, expected: dict[str, list[int]], rule: str, keys: int
) -> None:
    """One of 160 tokens is in the pool of 320: for a second one in full there is no room."""
    use(engine, policy={"name": "flotilla"}, scheduler={"batching": rule, "micro_batches": 1})
    wanted = [
        submitted(number, [*COMMON, 5 + number], tenant=Tenant("ab"[number % keys]))
        for number in range(NUM_REQUESTS)
    ]
    completions = engine.generate(wanted)
    assert {name: one.tokens for name, one in completions.items()} == expected
    assert engine.most_running > 2
    assert engine.core.totals.preemptions == 0


def test_nothing_is_shared_where_that_is_turned_off(engine: Watched, expected: dict[str, list[int]]) -> None:
    use(engine, target=engine.config.target.model_dump() | {"prefix_sharing": False})
    completions = engine.generate([submitted(n, [*COMMON, 5 + n]) for n in range(NUM_REQUESTS)])
    assert {name: one.tokens for name, one in completions.items()} == expected
    assert engine.most_running == 1
