"""What steps take besides their forwards is predicted for as many requests as are at hand."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.step_overhead import StepOverhead


def test_before_any_step_it_is_what_the_profile_says_and_a_little_each_request() -> None:
    overhead = StepOverhead(2e-3)
    assert overhead.drafted_s(0) == pytest.approx(2e-3)
    assert overhead.plain_s(0) == pytest.approx(1e-3)
    assert overhead.drafted_s(32) > overhead.drafted_s(1)


def test_large_steps_and_small_ones_are_told_apart() -> None:
    overhead, rng = StepOverhead(1e-3), np.random.default_rng(0)
    for num_requests in rng.integers(1, 33, 600).tolist():
        noise = float(rng.uniform(0.9, 1.1))
        overhead.observe(num_requests, noise * (1e-3 + 2e-4 * num_requests), drafted=True)
        overhead.observe(num_requests, noise * 8e-4, drafted=False)
    assert overhead.drafted_s(1) == pytest.approx(1.2e-3, rel=0.35)
    assert overhead.drafted_s(32) == pytest.approx(7.4e-3, rel=0.1)  # a mean would say 4.3 ms
    assert overhead.plain_s(1) == pytest.approx(8e-4, rel=0.25)
    assert overhead.plain_s(32) == pytest.approx(8e-4, rel=0.3)


def test_a_plain_step_is_never_believed_to_take_more_than_one_with_drafts() -> None:
    """Of plain steps of 200 requests, never seen, 11 ms were expected, and so none was ever made."""
    overhead = StepOverhead(2e-3)
    for num_requests in 20 * [1, 4, 16, 64, 200]:
        overhead.observe(num_requests, 2e-3, drafted=True)
    for num_requests in (1, 16, 200):
        assert overhead.plain_s(num_requests) <= overhead.drafted_s(num_requests)
    assert overhead.drafted_s(200) < 2.5e-3


def test_a_step_without_requests_says_nothing_and_one_without_overhead_does() -> None:
    overhead = StepOverhead(1e-3)
    overhead.observe(0, 1.0, drafted=True)
    assert overhead.drafted_s(4) == StepOverhead(1e-3).drafted_s(4)
    for _ in range(200):
        overhead.observe(4, 0.0, drafted=True)
    assert overhead.drafted_s(4) == pytest.approx(0.0, abs=1e-6)


def test_rare_steps_of_a_kind_are_believed_only_after_another_of_theirs() -> None:
    """The first pays for the change: believed, it would keep the kind rare."""
    overhead = StepOverhead(1e-3)
    for step in range(600):
        is_rare = step % 60 in (0, 1)
        seconds = 9e-3 if step % 60 == 0 else 7e-4 if is_rare else 2e-3
        overhead.observe(1, seconds, drafted=not is_rare)
    assert overhead.plain_s(1) == pytest.approx(7e-4, rel=0.1)
    assert overhead.drafted_s(1) == pytest.approx(2e-3, rel=0.1)


def test_plain_steps_to_come_are_as_those_sent_ahead_and_the_first_in_turn_of_each_run() -> None:
    overhead = StepOverhead(1e-3, sends_ahead=True)
    assert overhead.plain_s(8) < StepOverhead(1e-3).plain_s(8) / 2
    for _ in range(40):
        for _ in range(10):
            overhead.observe(8, 2e-3, drafted=True)
        overhead.observe(8, 1.5e-3, drafted=False)
        for _ in range(5):
            overhead.observe(8, 3e-4, drafted=False, was_ahead=True)
    assert overhead.plain_s(8) == pytest.approx((1.5e-3 + 5 * 3e-4) / 6, rel=0.1)
    assert overhead.drafted_s(8) == pytest.approx(2e-3, rel=0.1)


def test_plain_steps_say_nothing_until_they_have_settled() -> None:
    """Nor does the next step with drafts count as one after its own kind for that."""
    overhead = StepOverhead(1e-3, sends_ahead=True)
    for _ in range(40):
        for place in range(10):
            overhead.observe(8, 9e-3 if place == 0 else 2e-3, drafted=True)
        overhead.observe(8, 1.5e-3, drafted=False, settled=False)
        overhead.observe(8, 1e-3, drafted=False, was_ahead=True, settled=False)
        for _ in range(4):
            overhead.observe(8, 3e-4, drafted=False, was_ahead=True)
    assert overhead.plain_s(8) == pytest.approx(3e-4, rel=0.02)
    assert overhead.drafted_s(8) == pytest.approx(2e-3, rel=0.1)


def test_where_no_step_is_sent_ahead_for_long_plain_ones_wait_for_the_scheduler() -> None:
    """As where all requests follow grammars; and until one is again."""
    overhead = StepOverhead(1e-3, sends_ahead=True)
    for _ in range(10):
        overhead.observe(8, 3e-4, drafted=False, was_ahead=True)
    for _ in range(200):
        overhead.observe(8, 1.5e-3, drafted=False)
    assert overhead.plain_s(8) == pytest.approx(1.5e-3, rel=0.1)
    for _ in range(60):
        overhead.observe(8, 3e-4, drafted=False, was_ahead=True)
    assert overhead.plain_s(8) < 5e-4
