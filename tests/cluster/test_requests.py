"""The request state machine over the full product of states and triggers."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest

from cluster.request_receipt import receipt
from cluster.requests import TRANSITIONS, IllegalTransition, Request, State, Trigger
from cluster.stream_messages import Resumed, Submit
from engine.sampling_params import SamplingParams
from verifier.messages import Verdict


def make() -> Request:
    sampling = SamplingParams(max_tokens=4, stop_token_ids=(9,))
    return Request(Submit(request_id="r", prompt=[1, 2], sampling=sampling), "client", 1.0, 0)


@pytest.mark.parametrize(("state", "trigger"), list(product(State, Trigger)))
def test_what_the_table_does_not_name_is_illegal(state: State, trigger: Trigger) -> None:
    request = make()
    request.state = state
    target = TRANSITIONS.get((state, trigger))
    if target is None:
        with pytest.raises(IllegalTransition):
            request.advance(trigger)
        assert request.state is state
    else:
        request.advance(trigger)
        assert request.state is target


def test_nothing_leaves_the_end_and_everything_reaches_it() -> None:
    assert not any(state is State.FINISHED for state, _ in TRANSITIONS)
    for state in State:
        if state is not State.FINISHED:
            assert TRANSITIONS[(state, Trigger.FINISH)] is State.FINISHED


@pytest.mark.parametrize(
    ("tokens", "reason"), [([3], None), ([3, 9], "stop"), ([3, 4, 5, 6], "length"), ([3, 4, 5, 9], "stop")]
)
def test_the_end_is_read_off_the_committed_tokens(tokens: list[int], reason: str | None) -> None:
    request = make()
    request.commit(Verdict(request_id="r", tokens=tokens), now=2.0)
    assert request.finish_reason(max_model_tokens=100) == reason


def test_the_receipt_counts_time_per_token_after_the_first() -> None:
    request = make()
    request.commit(Verdict(request_id="r", tokens=[3]), now=2.0)
    request.commit(Verdict(request_id="r", tokens=[4, 5]), now=2.5)
    found = receipt(request, now=3.0)
    assert found.ttft_ms == pytest.approx(1000.0)
    assert found.tpot_ms == pytest.approx(250.0)
    assert found.e2e_ms == pytest.approx(1500.0)
    assert found.num_output_tokens == 3


@pytest.mark.parametrize("was_preempted", [False, True])
def test_the_receipt_of_one_that_goes_on_here_counts_from_when_it_came(was_preempted: bool) -> None:
    """It had two tokens of another cell 1 and 1.5 s after it came, and was sent here at 4 s."""
    before = Resumed(first_token_s=1.0, last_token_s=1.5, sent_s=4.0)
    asked = msgspec.structs.replace(make().submit, output=[3, 4], resumed=before)
    request = Request(asked, "a", 10.0, 0, output=[3, 4])
    if was_preempted:
        request.preempted_s = (0.0, 0.25)
    request.commit(Verdict(request_id="r", tokens=[5, 6]), now=10.5)
    request.commit(Verdict(request_id="r", tokens=[7]), now=11.0)
    found = receipt(request, now=20.0)
    assert (found.ttft_ms, found.e2e_ms) == pytest.approx((1000.0, 5000.0))
    assert found.tpot_ms == pytest.approx(4000.0 / 4)
    assert found.preempted_ms == pytest.approx((0.0, 3000.0 + 250.0 * was_preempted))
    assert found.num_output_tokens == 5


def test_one_that_ends_before_it_had_more_has_the_times_of_what_it_had() -> None:
    before = Resumed(first_token_s=1.0, last_token_s=1.5, sent_s=4.0)
    asked = msgspec.structs.replace(make().submit, output=[3, 4], resumed=before)
    found = receipt(Request(asked, "a", 10.0, 0, output=[3, 4]), now=12.0)
    assert (found.ttft_ms, found.tpot_ms, found.e2e_ms) == pytest.approx((1000.0, 500.0, 1500.0))
    assert found.preempted_ms == pytest.approx((0.0, 4500.0))


def test_tokens_from_any_position() -> None:
    request = make()
    request.extend([3, 4])
    assert [request.tokens_from(start) for start in range(5)] == [[1, 2, 3, 4], [2, 3, 4], [3, 4], [4], []]
