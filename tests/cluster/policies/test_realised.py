"""What steps with drafts brought, beside what was predicted of them."""

from __future__ import annotations

import pytest

from cluster.policies.decode_batch import DecodeBatch
from cluster.policies.realised import MOST_OFF, MOST_PROMPTS, SMOOTHING, Realised
from tests.cluster.policies.batches import request


def batch(tokens: int, seconds: float, names: str = "ab") -> DecodeBatch:
    """Requests that all have so many tokens so long after their first one."""
    return DecodeBatch([request(name, num_decoded=tokens, decoding_s=seconds) for name in names])


def learnt(realised: Realised, tokens_per_step: int, num_steps: int, predicted: float) -> float:
    """The gain after steps of a hundredth of a second, each of which brings each of two so many tokens."""
    for step in range(num_steps):
        at = batch(step * tokens_per_step, step * 0.01)
        realised.look(at, step, 0.0)
        realised.drafted(at, step, predicted)
    return realised.gain(2)


def test_drafts_that_bring_more_than_predicted_are_believed_to() -> None:
    assert learnt(Realised(), 3, 200, predicted=500.0) == pytest.approx(1.2, rel=1e-3)
    assert learnt(Realised(), 3, 2, predicted=500.0) == pytest.approx(1.0 + SMOOTHING * 0.2)


def test_fewer_tokens_than_predicted_are_no_reason_to_draft_less() -> None:
    realised = Realised()
    assert learnt(realised, 2, 200, predicted=500.0) == 1.0
    # But they count: it takes as many steps to make up for them.
    assert learnt(realised, 3, 3, predicted=500.0) == 1.0


def test_prompts_take_no_time_from_drafts() -> None:
    """Where answers are short, prompts are in every step."""
    realised = Realised()
    realised.drafted(batch(5, 1.0), 0, 500.0)
    realised.look(batch(8, 1.0 + 0.01 + 0.002), 1, 0.002)
    assert realised.gain(2) == pytest.approx(1.0 + SMOOTHING * 0.2)


def test_sizes_are_told_apart() -> None:
    realised = Realised()
    learnt(realised, 3, 50, predicted=500.0)
    assert realised.gain(3) == realised.gain(2) > 1.0
    assert realised.gain(1) == realised.gain(4) == 1.0


@pytest.mark.parametrize(
    ("then", "now", "step", "prompts_s"),
    [
        (batch(5, 1.0), batch(90, 1.0), 1, 0.0),  # no time has passed
        (batch(5, 1.0), batch(5, 1.1), 1, 0.0),  # no token came
        (batch(5, 1.0), batch(90, 1.1), 2, 0.0),  # there was a step between
        (batch(5, 1.0), batch(90, 1.1, "cd"), 1, 0.0),  # they have left
        (batch(5, 1.0, "abc"), batch(90, 1.1, "a"), 1, 0.0),  # most of them have
        (batch(5, 1.0), batch(90, 1.1), 1, 0.11 * MOST_PROMPTS),  # it was a step of prompts
    ],
)
def test_steps_that_say_nothing_are_passed_over(
    then: DecodeBatch, now: DecodeBatch, step: int, prompts_s: float
) -> None:
    realised = Realised()
    realised.drafted(then, 0, 100.0)
    realised.look(now, step, prompts_s)
    assert realised.gain(2) == realised.gain(3) == 1.0


def test_no_step_is_believed_beyond_a_factor_and_who_has_left_had_as_many_tokens() -> None:
    realised = Realised()
    realised.drafted(batch(5, 1.0, "abc"), 0, 100.0)
    realised.look(batch(900, 1.1, "ab"), 1, 0.0)
    assert realised.gain(3) == pytest.approx(1.0 + SMOOTHING * (MOST_OFF - 1.0))
    other = Realised()
    other.drafted(batch(5, 1.0, "abc"), 0, 100.0)
    other.look(batch(10, 1.1, "ab"), 1, 0.0)
    assert other.gain(3) == pytest.approx(1.0 + SMOOTHING * 0.5)
