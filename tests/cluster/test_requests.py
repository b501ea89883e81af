"""The request state machine over the full product of states and triggers."""

from __future__ import annotations

from itertools import product

import pytest

from cluster.requests import TRANSITIONS, IllegalTransition, Request, State, Trigger
from cluster.stream_messages import Submit
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
    receipt = request.receipt(now=3.0)
    assert receipt.ttft_ms == pytest.approx(1000.0)
    assert receipt.tpot_ms == pytest.approx(250.0)
    assert receipt.e2e_ms == pytest.approx(1500.0)
    assert receipt.num_output_tokens == 3


def test_tokens_from_any_position() -> None:
    request = make()
    request.extend([3, 4])
    assert [request.tokens_from(start) for start in range(5)] == [[1, 2, 3, 4], [2, 3, 4], [3, 4], [4], []]
