"""Busy, silent and stuck workers told apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.health_config import HealthConfig
from cluster.stalls import LOOKS, Signs, Suspicions, call_limit_s, judge

CONFIG = HealthConfig(silent_s=5, stuck_factor=20, first_call_s=120)
FLOOR_S = 10.0


def signs(
    *, heard_s: float = 0.1, call_s: float | None = None, predicted_s: float = 0.0, num_answered: int = 7
) -> Signs:
    return Signs(
        heard_s=heard_s, answered_s=30.0, call_s=call_s, predicted_s=predicted_s, num_answered=num_answered
    )


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (signs(), None),  # idle for long
        (signs(call_s=9.0), None),  # busy
        (signs(call_s=10.0), "stuck"),
        (signs(call_s=39.0, predicted_s=2.0), None),  # a very long prompt
        (signs(call_s=40.0, predicted_s=2.0), "stuck"),
        (signs(call_s=100.0, num_answered=0), None),  # kernels are compiled
        (signs(call_s=120.0, num_answered=0), "stuck"),
        (signs(heard_s=5.0), "silent"),  # idle, and stopped
        (signs(heard_s=5.0, call_s=5.0, num_answered=0), "silent"),  # a first call is no excuse for silence
        (signs(heard_s=4.9, call_s=5.0), None),
    ],
)
def test_who_is_given_up(known: Signs, expected: str | None) -> None:
    assert judge(known, FLOOR_S, CONFIG) == expected


@given(st.floats(0, 100), st.floats(0, 1000), st.floats(0, 50), st.integers(0, 2), st.floats(0.1, 20))
def test_no_call_within_what_it_may_take_is_stuck(
    heard_s: float, call_s: float, predicted_s: float, num_answered: int, floor_s: float
) -> None:
    known = signs(heard_s=heard_s, call_s=call_s, predicted_s=predicted_s, num_answered=num_answered)
    reason = judge(known, floor_s, CONFIG)
    is_within = call_s < floor_s or call_s < 20 * predicted_s or (call_s < 120 and not num_answered)
    assert reason == ("silent" if heard_s >= 5 else None if is_within else "stuck")
    assert call_limit_s(known, floor_s, CONFIG) >= floor_s


def test_one_look_is_not_enough_and_an_answer_clears_the_suspicion() -> None:
    seen = Suspicions()
    assert [seen.confirm("w", "silent") for _ in range(LOOKS)] == [False] * (LOOKS - 1) + [True]
    assert not seen.confirm("w", "stuck")
    assert not seen.confirm("w", None)
    assert not seen.confirm("w", "stuck"), "looks that do not follow each other were added up"
    seen.keep(set())
    assert not seen.confirm("w", "stuck"), "its successor was suspected for it"


def test_settings_that_take_a_late_sign_for_a_death_are_refused() -> None:
    with pytest.raises(ValidationError, match="less than four times"):
        HealthConfig(heartbeat_s=2.0, silent_s=5.0)
