"""Drafters catch up in one call each, of no more tokens than there is time for."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.catching_up import catch_up
from cluster.drafter_pool import DrafterPool
from cluster.requests import Request
from cluster.stream_messages import Submit
from cluster.switching import READ_WITH_DRAFT
from drafters.messages import DraftCall
from engine.sampling_params import SamplingParams
from tests.cluster.test_drafter_pool import answer, capabilities, make_pool

TOKEN_S = 1e-3


def pool_of(*names: str) -> DrafterPool:
    """Drafters that read a token in a millisecond."""
    pool = make_pool(*names)
    pool.add("lookup", capabilities("lookup"), 8)
    for name in names:
        pool.costs.have_read(name, 100, 100 * TOKEN_S)
    return pool


def request_of(pool: DrafterPool, name: str, drafter: str, num_prompt: int) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=200)
    submit = Submit(request_id=name, prompt=[1] * num_prompt, sampling=sampling)
    request = Request(submit, "client", 0.0, 0, drafter=drafter)
    pool.drafters[drafter].served.add(name)
    return request


def read(pool: DrafterPool, name: str, call: DraftCall) -> None:
    num_tokens = sum(len(item.tokens if item.spec is None else item.spec.tokens) for item in call.items)
    result = msgspec.structs.replace(answer(call, 0, 0), seconds=num_tokens * TOKEN_S)
    assert pool.answered(name, result, 0.0) is not None


def test_one_call_for_each_drafter_that_keeps_something() -> None:
    pool = pool_of("a", "b")
    requests = [request_of(pool, f"r{n}", ("a", "b", "lookup")[n % 3], num_prompt=20 + n) for n in range(12)]
    calls = dict(catch_up(pool, requests, 0.0, most_s=1.0))
    assert {name: [item.request_id for item in call.items] for name, call in calls.items()} == {
        "a": ["r0", "r3", "r6", "r9"],
        "b": ["r1", "r4", "r7", "r10"],
    }
    assert catch_up(pool, requests, 0.0, most_s=1.0) == [], "they are being read already"
    assert not any(pool.can_draft_now(request) for request in requests[:2])
    for name, call in calls.items():
        read(pool, name, call)
    assert all(pool.can_draft_now(request) for request in requests)


def test_what_there_is_no_time_for_is_read_later_and_drafts_come_in_between() -> None:
    pool = pool_of("a")
    known = request_of(pool, "known", "a", num_prompt=20)
    [(_, call)] = catch_up(pool, [known], 0.0, most_s=0.0)
    read(pool, "a", call)
    behind = [request_of(pool, f"r{n}", "a", num_prompt=60) for n in range(4)]
    most_s, waited = 130 * TOKEN_S, 0
    while not all(pool.can_draft_now(request) for request in behind):
        assert pool.can_draft_now(known), "nobody is drafted for while prompts are read"
        [(_, call)] = catch_up(pool, [r for r in behind if not pool.can_draft_now(r)], 0.0, most_s)
        assert [len(item.spec.tokens) for item in call.items if item.spec] == [60, 60]
        read(pool, "a", call)
        waited += 1
    assert waited == 2


def test_what_a_drafter_reads_already_counts() -> None:
    pool = pool_of("a")
    first, second, third = (request_of(pool, f"r{n}", "a", num_prompt=60) for n in range(3))
    assert len(catch_up(pool, [first], 0.0, most_s=0.0)) == 1, "the first is read whatever it takes"
    assert catch_up(pool, [second], 0.0, most_s=100 * TOKEN_S) == []
    [(_, call)] = catch_up(pool, [second, third], 0.0, most_s=130 * TOKEN_S)
    assert [item.request_id for item in call.items] == ["r1"]


def test_only_what_is_new_is_counted_and_sent() -> None:
    pool = pool_of("a")
    requests = [request_of(pool, f"r{n}", "a", num_prompt=60) for n in range(3)]
    [(_, call)] = catch_up(pool, requests, 0.0, most_s=1.0)
    read(pool, "a", call)
    for request in requests:
        request.extend(range(READ_WITH_DRAFT + 1))
    [(_, call)] = catch_up(pool, requests, 0.0, most_s=60 * TOKEN_S)
    assert [len(item.tokens) for item in call.items] == [READ_WITH_DRAFT + 1] * 3


@pytest.mark.parametrize("max_depth", [4, 16, 32])
def test_who_was_accepted_whole_drafts_on_however_deep(max_depth: int) -> None:
    """The target's token comes on top: a chain of 16 was one too many, and every second step was plain."""
    pool = pool_of()
    pool.add("a", msgspec.structs.replace(capabilities("model"), max_depth=max_depth), 8)
    request = request_of(pool, "r", "a", num_prompt=20)
    [(_, call)] = catch_up(pool, [request], 0.0, most_s=1.0)
    read(pool, "a", call)
    request.extend(range(max_depth + 1))
    assert pool.can_draft_now(request)
    request.extend(range(max(max_depth + 1, READ_WITH_DRAFT)))
    assert not pool.can_draft_now(request)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=8), st.floats(0.0, 0.3))
def test_everybody_is_read_in_order_within_the_time(prompts: list[int], most_s: float) -> None:
    pool = pool_of("a")
    behind = [request_of(pool, f"r{n}", "a", num_prompt=size) for n, size in enumerate(prompts)]
    done: list[str] = []
    while len(done) < len(behind):
        [(_, call)] = catch_up(pool, behind[len(done) :], 0.0, most_s)
        sizes = [len(item.spec.tokens) for item in call.items if item.spec]
        assert len(sizes) == 1 or sum(sizes) * TOKEN_S <= most_s + 1e-9
        done.extend(item.request_id for item in call.items)
        left = prompts[len(done) : len(done) + 1]
        assert not left or (sum(sizes) + left[0]) * TOKEN_S > most_s - 1e-9, "there was time for more"
        read(pool, "a", call)
    assert done == [request.request_id for request in behind]
