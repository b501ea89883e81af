"""Buckets on fake time: never more than the limit, and never less than what is left of it."""

from __future__ import annotations

import heapq
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.security_config import KeyLimits
from deployments.rate_limit import KeyLimiter, TokenBucket, duration

PER_MINUTE = st.integers(1, 100_000)
#: Times between asking, and what is asked for as a share of the limit.
ASKED = st.lists(st.tuples(st.floats(0.0, 90.0), st.floats(0.001, 1.0)), min_size=1, max_size=40)


def admitted(per_minute: float, asked: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Time and amount of what a bucket lets through."""
    bucket, now, taken = TokenBucket(per_minute, 0.0), 0.0, []
    for pause, share in asked:
        now += pause
        amount = share * per_minute
        if bucket.wait_s(amount, now) == 0.0:
            bucket.take(amount, now)
            taken.append((now, amount))
    return taken


@given(PER_MINUTE, ASKED)
def test_no_window_has_more_than_its_minutes_and_one_bucket(
    per_minute: int, asked: list[tuple[float, float]]
) -> None:
    taken = admitted(per_minute, asked)
    for first, (begin, _) in enumerate(taken):
        total = 0.0
        for now, amount in taken[first:]:
            total += amount
            assert total <= per_minute * (1.0 + (now - begin) / 60.0) * (1 + 1e-6) + 1e-3


@given(PER_MINUTE, ASKED)
def test_what_is_refused_would_have_been_too_much(per_minute: int, asked: list[tuple[float, float]]) -> None:
    """By an oracle that adds up what flowed in since the bucket was last full, whenever that was."""
    taken = admitted(per_minute, asked)
    now = 0.0
    for pause, share in asked:
        now += pause
        if any(at == now and amount == share * per_minute for at, amount in taken):
            continue
        before = [(at, amount) for at, amount in taken if at <= now]
        least = min(
            [per_minute]
            + [
                per_minute
                + (now - begin) / 60.0 * per_minute
                - sum(amount for at, amount in before if at >= begin)
                for begin, _ in before
            ]
        )
        assert share * per_minute > least - 1e-3


@given(PER_MINUTE, ASKED, st.floats(0.001, 1.0))
def test_waiting_as_long_as_told_is_enough_and_less_is_not(
    per_minute: int, asked: list[tuple[float, float]], share: float
) -> None:
    bucket, now = TokenBucket(per_minute, 0.0), 0.0
    for pause, one in asked:
        now += pause
        bucket.take(one * per_minute, now)
    wait = bucket.wait_s(share * per_minute, now)
    if wait > 0.01:
        assert bucket.wait_s(share * per_minute, now + 0.9 * wait) > 0.0
    assert bucket.wait_s(share * per_minute, now + wait + 1e-3) == 0.0


@given(st.integers(10, 10_000), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 30.0))
def test_settled_is_as_if_only_what_was_used_had_been_taken(
    limit: int, asked: float, share_used: float, later_s: float
) -> None:
    reserved = int(asked * limit)
    used = int(share_used * reserved)
    limits = KeyLimits(tokens_per_minute=limit)
    settled, exact = KeyLimiter(limits, 0.0), KeyLimiter(limits, 0.0)
    assert settled.reserve(reserved, 0.0) is None
    assert exact.reserve(used, 0.0) is None
    settled.settle(reserved, used, later_s)
    left, right = (int(one.headers(later_s)["x-ratelimit-remaining-tokens"]) for one in (settled, exact))
    # Never more: what flowed in meanwhile is lost where the bucket ran over, never where it was empty.
    assert abs(left - right) <= 1


@given(st.integers(1, 1000), st.integers(1, 8), st.integers(1, 8))
def test_front_ends_together_keep_to_the_limit(limit: int, before: int, after: int) -> None:
    """In the first minute at most two minutes' worth goes through; whoever joins brings a full share."""
    limiters = [KeyLimiter(KeyLimits(requests_per_minute=limit), 0.0) for _ in range(max(before, after))]
    taken = 0
    for second in range(61):
        active = limiters[: before if second < 30 else after]
        for limiter in active:
            limiter.share_among(len(active), float(second))
            for _ in range(3):
                if limiter.open(float(second)) is None:
                    taken += 1
                    limiter.close()
    # A front end that has but a fraction of a request in its bucket may still let one through when full.
    newcomers = max(0, after - before) / after
    assert taken <= (2 + newcomers) * limit + 2 * len(limiters)


def test_a_request_above_a_share_but_below_the_limit_is_served_in_time() -> None:
    limiter = KeyLimiter(KeyLimits(tokens_per_minute=100), 0.0)
    limiter.share_among(4, 0.0)
    assert limiter.reserve(80, 0.0) is None
    refusal = limiter.reserve(80, 0.0)
    assert refusal is not None
    assert refusal.retry_after_s is not None
    # The debt of 55 and a share of 25 flow back at 25 a minute.
    assert refusal.retry_after_s == pytest.approx(60.0 * 80 / 25)
    assert limiter.reserve(80, refusal.retry_after_s) is None
    too_many = limiter.reserve(101, 1e6)
    assert too_many is not None
    assert too_many.retry_after_s is None


@pytest.mark.parametrize("limits", [KeyLimits(requests_per_minute=10), KeyLimits(tokens_per_minute=1000)])
def test_those_who_are_refused_do_not_all_come_back_at_once(limits: KeyLimits) -> None:
    """All were told the same time, at which one of them was taken: 40 had to ask 505 times."""
    limiter, num_asked, num_retried = KeyLimiter(limits, 0.0), 0, 0
    coming = [(0.0, 0)] * 40
    while coming:
        now, tries = heapq.heappop(coming)
        num_asked += 1
        refusal = limiter.open(now)
        if refusal is None:
            limiter.close()
            refusal = limiter.reserve(100, now)
        if refusal is None:
            num_retried += tries <= 2
            last_s = now
        else:
            assert refusal.retry_after_s is not None
            assert refusal.retry_after_s <= 60.0
            # As the header is rounded, and a little later for the way.
            heapq.heappush(coming, (now + math.ceil(refusal.retry_after_s) + 0.02, tries + 1))
    assert num_asked < 130
    assert num_retried >= 24
    assert last_s < 190.0


def test_whoever_does_not_wait_is_told_times_of_the_next_minute() -> None:
    limiter = KeyLimiter(KeyLimits(requests_per_minute=10), 0.0)
    told = []
    for tick in range(400):
        refusal = limiter.open(0.5 * tick)
        if refusal is None:
            limiter.close()
        else:
            told.append(refusal.retry_after_s or 0.0)
    assert 50.0 < max(told) <= 60.0
    assert min(told) < 6.0


def test_only_so_many_are_open_at_once() -> None:
    limiter = KeyLimiter(KeyLimits(max_concurrent=2, requests_per_minute=10), 0.0)
    assert limiter.open(0.0) is None
    assert limiter.open(0.0) is None
    refusal = limiter.open(0.0)
    assert refusal is not None
    assert (refusal.kind, refusal.limit) == ("concurrent", 2)
    # One that was refused took nothing.
    assert limiter.headers(0.0)["x-ratelimit-remaining-requests"] == "8"
    limiter.close()
    assert limiter.open(0.0) is None
    limiter.share_among(2, 0.0)
    limiter.close()
    assert limiter.open(0.0) is not None


def test_headers_are_openais() -> None:
    limiter = KeyLimiter(KeyLimits(requests_per_minute=60, tokens_per_minute=6000), 0.0)
    limiter.open(0.0)
    limiter.reserve(3000, 0.0)
    assert limiter.headers(0.0) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "3000",
        "x-ratelimit-reset-tokens": "30s",
    }
    assert KeyLimiter(KeyLimits(), 0.0).headers(0.0) == {}


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0, "0ms"), (0.02, "20ms"), (7.5, "7.5s"), (59.96, "1m0s"), (60.0, "1m0s"), (361.0, "6m1s")],
)
def test_durations_are_written_as_openai_does(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
