"""What an end-to-end objective asks of the first token and of the mean of the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.requests import Request, State, Trigger
from cluster.stream_messages import Objective, Prediction, Submit
from engine.sampling_params import SamplingParams
from engine.tree import TokenTree
from verifier.messages import Verdict


def request(objective: Objective, max_tokens: int, predicted: Prediction | None = None) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    submit = Submit(request_id="r", prompt=[1, 2], sampling=sampling, objective=objective)
    return Request(submit, "client", 2.0, 0, predicted)


def first_token(made: Request, now: float) -> None:
    for trigger in (Trigger.ADMITTED, Trigger.CHUNK_SENT, Trigger.PREFILLED):
        made.advance(trigger)
    assert made.state is State.READY
    made.tree = TokenTree.root_only(2)
    made.commit(Verdict(request_id="r", tokens=[3], nodes=[]), now)


@given(
    e2e_ms=st.floats(1.0, 1e5),
    ttft_s=st.floats(0.0, 50.0),
    tpot_ms=st.one_of(st.none(), st.floats(0.1, 1e3)),
    max_tokens=st.integers(2, 500),
)
def test_a_mean_at_the_pace_ends_in_time_and_none_slower_does(
    e2e_ms: float, ttft_s: float, tpot_ms: float | None, max_tokens: int
) -> None:
    made = request(Objective(tpot_ms=tpot_ms, e2e_ms=e2e_ms), max_tokens)
    first_token(made, 2.0 + ttft_s)
    pace_ms = made.pace.tpot_ms
    assert made.pace.ttft_ms is None
    if 1e3 * ((2.0 + ttft_s) - 2.0) >= e2e_ms:  # as clocks tell, which round
        assert pace_ms == tpot_ms  # it is lost, whatever comes
        return
    assert pace_ms is not None
    end_ms = 1e3 * ttft_s + (max_tokens - 1) * pace_ms
    if tpot_ms is None or pace_ms < tpot_ms:
        assert end_ms == pytest.approx(e2e_ms, rel=1e-6, abs=1e-3)
    else:
        assert pace_ms == tpot_ms
        assert end_ms <= e2e_ms * (1 + 1e-6) + 1e-3


def test_the_first_token_leaves_the_predicted_time_for_decoding() -> None:
    predicted = Prediction(ttft_ms=100.0, tpot_ms=10.0, e2e_ms=1090.0)
    relaxed = request(Objective(e2e_ms=2000.0), 100, predicted)
    assert relaxed.pace.ttft_ms == pytest.approx(2000.0 - 99 * 10.0)
    assert relaxed.pace.tpot_ms == pytest.approx(10.0)
    late = request(Objective(e2e_ms=1000.0), 100, predicted)
    assert late.pace.ttft_ms == 100.0
    assert late.pace.tpot_ms == pytest.approx(900.0 / 99)
    strict = request(Objective(e2e_ms=2000.0, ttft_ms=50.0, tpot_ms=5.0), 100, predicted)
    assert strict.pace == Objective(tpot_ms=5.0, ttft_ms=50.0)


def test_without_one_the_objectives_are_the_requests_own() -> None:
    objective = Objective(tpot_ms=20.0, ttft_ms=300.0)
    assert request(objective, 10).pace is objective
