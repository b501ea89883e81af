"""What was learnt of a load that is not there any more does not keep it from coming back."""

from __future__ import annotations

import msgspec
import pytest

from cluster.batching.fair_queue import FairQueue
from cluster.cost_model import DEFAULT_PROFILE, CostModel
from cluster.forecast import Forecast, Schedule
from cluster.requests import Request, State
from engine.sampling_params import SamplingParams
from tests.cluster.test_overload_admission import answer, submitted


class Steps:
    """Answers of a target, one after the other."""

    def __init__(self) -> None:
        self.forecast, self.now = Forecast(CostModel(DEFAULT_PROFILE), 512, 8), 0.0

    def take(self, num_decoding: int, step_s: float, num_steps: int, *, prompts: int = 0) -> None:
        """Steps in which so many decode and, beside them, so many prompts are computed."""
        decoding = [Request(submitted(number), "client", 0.0, number) for number in range(num_decoding)]
        for request in decoding:
            request.state, request.first_token_at = State.VERIFYING, 0.0
        self.forecast.verified(answer(decoding=decoding), decoding, self.now)
        for _ in range(num_steps):
            computed = [Request(submitted(9), "client", 0.0, 9) for _ in range(prompts)]
            for request in computed:
                request.state, request.first_chunk_at = State.PREFILL_SENT, self.now
            self.now += step_s
            self.forecast.verified(
                answer(decoding=decoding, computed=computed), [*decoding, *computed], self.now
            )


def test_a_load_that_was_slow_once_is_expected_as_the_loads_seen_now() -> None:
    """Half of all requests were refused for ever: the load at which they would have run was never seen."""
    steps = Steps()
    steps.take(2, 0.1, 50)
    assert steps.forecast.tpot_s(2, drafts=False) > 0.09
    steps.take(1, 0.01, 200)
    assert steps.forecast.tpot_s(2, drafts=False) > 0.08  # not at once
    steps.take(1, 0.01, 12_000)
    assert steps.forecast.tpot_s(2, drafts=False) < 0.02
    # What lets expect more is not believed of others: that is soon seen.
    steps.take(1, 0.2, 100)
    assert steps.forecast.tpot_s(2, drafts=False) < 0.03


def test_so_are_prompts_beside_it() -> None:
    steps = Steps()
    steps.take(2, 0.2, 50, prompts=1)
    assert steps.forecast.prefill_s(3, 2) > 0.15
    steps.take(1, 0.011, 800, prompts=1)
    assert steps.forecast.prefill_s(3, 2) < 0.03


@pytest.mark.parametrize("is_sent", [False, True], ids=["waits for the next call", "in the call sent ahead"])
def test_who_comes_while_a_short_prompt_is_computed_does_not_say_that_steps_have_no_room(
    is_sent: bool,
) -> None:
    """Where one came in each step, long prompts were expected to take as many steps as they have tokens."""
    steps = Steps()
    expected_s = steps.forecast.prefill_s(3000, 0)
    for _ in range(60):
        computed, newcomer = (Request(submitted(number), "client", 0.0, number) for number in (0, 1))
        computed.state, computed.first_chunk_at = State.PREFILL_SENT, steps.now
        newcomer.state = State.PREFILLING
        if is_sent:
            newcomer.state, newcomer.first_chunk_at = State.PREFILL_SENT, steps.now
        steps.now += 0.012
        steps.forecast.verified(answer(computed=[computed]), [computed, newcomer], steps.now)
    assert steps.forecast.prefill_s(3000, 0) < 2 * expected_s


def test_who_is_begun_and_left_out_says_it() -> None:
    steps = Steps()
    expected_s = steps.forecast.prefill_s(3000, 0)
    left = Request(submitted(1), "client", 0.0, 1)
    left.state, left.first_chunk_at = State.PREFILLING, steps.now
    for _ in range(60):
        computed = Request(submitted(0), "client", 0.0, 0)
        computed.state, computed.first_chunk_at = State.PREFILL_SENT, steps.now
        steps.now += 0.012
        steps.forecast.verified(answer(computed=[computed]), [computed, left], steps.now)
    assert steps.forecast.prefill_s(3000, 0) > 4 * expected_s


def test_answers_without_a_bound_are_reckoned_with_as_what_is_assumed_of_them() -> None:
    """By all that the window leaves, one that waits would be told to come back when thousands had ended."""
    forecast = Forecast(CostModel(DEFAULT_PROFILE), 512, 8)
    assumed = msgspec.structs.replace(
        submitted(1), sampling=SamplingParams(max_tokens=131_000), assumed_tokens=100
    )
    bounded = msgspec.structs.replace(submitted(1), sampling=SamplingParams(max_tokens=100))
    free = Schedule(0.0, (), (), 1)
    assert forecast.predict(assumed, (), free, drafts=False) == forecast.predict(
        bounded, (), free, drafts=False
    )
    assert forecast.alone(assumed, drafts=True) == forecast.alone(bounded, drafts=True)
    assert forecast.work_s(assumed, drafts=False) == forecast.work_s(bounded, drafts=False)
    ends = [
        forecast.schedule([Request(one, "client", 0.0, 1)], (), is_full=True, drafts=False).ends_s
        for one in (assumed, bounded)
    ]
    assert ends[0] == ends[1]
    assert FairQueue().charge(assumed) == FairQueue().charge(bounded)


def test_they_say_of_bounded_answers_at_most_that_these_take_all() -> None:
    forecast = Forecast(CostModel(DEFAULT_PROFILE), 512, 8)
    bounded = msgspec.structs.replace(submitted(1), sampling=SamplingParams(max_tokens=100))
    before_s = forecast.work_s(bounded, drafts=False)
    assumed = msgspec.structs.replace(
        submitted(2), sampling=SamplingParams(max_tokens=131_000), assumed_tokens=100
    )
    for number in range(40):
        request = Request(assumed, "client", 0.0, number)
        request.output += [7] * (5000 if number < 20 else 50)
        if number == 20:  # all of those before came to more than was assumed
            assert forecast.work_s(bounded, drafts=False) == before_s
        forecast.ended(request, "stop")
    assert forecast.work_s(bounded, drafts=False) == pytest.approx(before_s / 2, rel=0.2)
