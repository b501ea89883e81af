"""Tries of what is believed not to pay: in runs, and at a bounded share of goodput."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import PolicyConfig
from cluster.policies.flotilla import PROBE_DEPTH, Flotilla
from cluster.policies.probing import LEAST_INTERVAL, MOST_INTERVAL, MOST_SPENT, PROBE_RUN, Probing
from tests.cluster.policies.batches import context, request


def tried(worth: float, num_steps: int, first_step: int = 0, times: float = 1.0) -> list[bool]:
    probing = Probing(first_step)
    return [probing.tries(step, worth, times) for step in range(num_steps)]


@given(st.floats(0.0, 1.0), st.integers(0, 100))
def test_tries_are_runs_of_one_length_with_bounded_gaps(worth: float, first_step: int) -> None:
    tries = tried(worth, 4 * MOST_INTERVAL, first_step)
    assert not any(tries[:first_step])
    begins = [step for step, now in enumerate(tries) if now and not (step and tries[step - 1])]
    assert begins[0] == first_step
    assert all(all(tries[begin : begin + PROBE_RUN]) for begin in begins[:-1])
    assert sum(tries) <= PROBE_RUN * len(begins)
    gaps = [later - begin for begin, later in pairwise(begins)]
    assert all(LEAST_INTERVAL <= gap <= MOST_INTERVAL for gap in gaps)


@pytest.mark.parametrize("worth", [0.6, 0.7, 0.8, 0.9, 0.99])
def test_they_cost_hardly_more_than_their_share(worth: float) -> None:
    tries = tried(worth, 100 * MOST_INTERVAL)
    lost = sum(tries) * (1.0 / worth - 1.0) / len(tries)
    assert lost <= 1.02 * MOST_SPENT


def test_what_is_nearly_as_good_is_tried_more_often() -> None:
    assert sum(tried(0.95, 5000)) > sum(tried(0.7, 5000)) > sum(tried(0.3, 5000)) > 0


@pytest.mark.parametrize("num_steps", [PROBE_RUN, 4 * PROBE_RUN])
def test_a_longer_try_is_one_run_and_no_more_frequent(num_steps: int) -> None:
    probing = Probing()
    tries = [probing.tries(step, 0.9, num_steps=num_steps) for step in range(5000)]
    begins = [step for step, now in enumerate(tries) if now and not (step and tries[step - 1])]
    assert all(sum(tries[begin:later]) == num_steps for begin, later in pairwise(begins))
    usual = tried(0.9, 5000)
    between = usual.index(True, PROBE_RUN) - PROBE_RUN
    assert {later - begin - num_steps for begin, later in pairwise(begins)} == {between}


def test_a_try_is_running_until_its_last_step() -> None:
    probing = Probing(10)
    assert not probing.is_running(10)
    assert probing.tries(10, 0.9)
    assert [probing.is_running(step) for step in (9 + PROBE_RUN, 10 + PROBE_RUN)] == [True, False]


@pytest.mark.parametrize("times", [1.0, 2.0, 3.9])
def test_of_time_no_more_is_spent_however_long_a_try_takes(times: float) -> None:
    tries = tried(0.97, 100 * MOST_INTERVAL, times=times)
    spent = times * sum(tries) / (times * sum(tries) + len(tries) - sum(tries))
    assert spent <= 1.02 * PROBE_RUN / LEAST_INTERVAL
    # However long, they do not come more seldom than so.
    rare = tried(0.97, 10 * MOST_INTERVAL, times=50.0)
    assert sum(rare) == 10 * PROBE_RUN


@pytest.mark.parametrize("max_depth", [1, 2, 6])
def test_tries_of_drafts_are_no_deeper_than_drafts_may_be(max_depth: int) -> None:
    """What is learnt from them is to be of what would be drafted."""
    policy = Flotilla(PolicyConfig(max_depth=max_depth))
    dear = context(draft_s=0.05)
    depths = {policy.plan([request(rate=0.1)], replace(dear, step=step))[0].depth for step in range(2000)}
    assert depths == {0, min(PROBE_DEPTH, max_depth)}
