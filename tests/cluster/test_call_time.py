"""A call as it is planned, sent and served: one prediction of its time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.batching.call_time import CallTime
from cluster.call_parts import NO_ROWS, chunk_rows
from cluster.cost_model import CostModel, CostProfile
from cluster.linear_cost import LinearCost
from cluster.requests import Request, State
from cluster.verify_calls import VerifyCalls
from engine.sampling_params import RequestSpec, SamplingParams
from engine.tree import TokenTree
from simulator.acceptance import AcceptanceModel
from simulator.scripts import Scripts
from simulator.workers import SimulatedTarget
from tests.cluster.batch_states import NOW, context, request
from verifier.messages import PrefillItem, PrefillProgress, VerifyCall, VerifyResult

TARGET = LinearCost(alpha=1e-6, beta=2e-8, gamma=5e-4, rho=3e-4, delta=8e-3, gamma_knee=1e-3, knee_tokens=40)


@given(st.integers(0, 500), st.integers(1, 300))
def test_a_chunks_rows_attend_to_what_is_before_them(num_computed: int, num_tokens: int) -> None:
    """With themselves or without: the mean of both."""
    places = range(num_computed, num_computed + num_tokens)
    keys = (sum(places) + sum(place + 1 for place in places)) / 2
    assert chunk_rows(num_computed, num_tokens) == (1, num_tokens, num_computed, keys)


@st.composite
def chunks(draw: st.DrawFn, order: int) -> tuple[Request, int]:
    prompt = draw(st.integers(1, 400))
    made = request(order, State.PREFILLING, prompt=prompt, computed=draw(st.integers(0, prompt - 1)))
    return made, draw(st.integers(1, prompt - made.num_computed))


@given(st.lists(st.integers(1, 6), max_size=3), st.data())
def test_a_call_is_planned_as_it_is_sent(num_rows: list[int], data: st.DataObject) -> None:
    """What is learnt of calls sent corrects the plans of the next ones: both must speak of the same time."""
    cost = CostModel(CostProfile(target=TARGET))
    cost.observe_call(cost.call_parts(NO_ROWS, chunk_rows(7, 30), drafted=False), 0.1)
    verifying = [request(n, State.DRAFTED, prompt=20 + n) for n in range(len(num_rows))]
    reading = [data.draw(chunks(10 + n)) for n in range(data.draw(st.integers(1, 3)))]
    time = CallTime.of([], 0, context(cost=cost))
    time.is_drafted = any(rows > 1 for rows in num_rows)
    for member, rows in zip(verifying, num_rows, strict=True):
        time.add(member, rows)
    *before, (last, num_tokens) = reading
    for member, most in before:
        time.add(member, most, is_chunk=True)
    planned_s = time.seconds_with(last, num_tokens)
    trees = {
        member.request_id: TokenTree.chain(1, [2] * (rows - 1), [-0.1] * (rows - 1))
        for member, rows in zip(verifying, num_rows, strict=True)
    }
    calls = VerifyCalls(cost)
    calls.build(verifying, trees, reading, NOW)
    assert calls.outstanding is not None
    assert planned_s == pytest.approx(calls.outstanding.predicted_s)


@given(st.integers(2, 60), st.data())
def test_the_simulated_target_takes_what_is_predicted(num_prompt: int, data: st.DataObject) -> None:
    scripts, sampling = Scripts(AcceptanceModel(), 100), SamplingParams()
    scripts.add("a", "chat", 0, num_prompt, 10)
    target = SimulatedTarget(scripts, TARGET, num_slots=1000)
    tokens = list(range(num_prompt))
    spec: RequestSpec | None = RequestSpec(
        request_id="a", tokens=tokens, prompt_len=num_prompt, sampling=sampling
    )
    num_computed = 0
    while num_computed < num_prompt - 1:
        size = data.draw(st.integers(1, num_prompt - 1 - num_computed))
        item = PrefillItem(request_id="a", num_tokens=size, spec=spec)
        result = target.step(VerifyCall(call_id=1, prefill=[item]))
        assert result.forward_seconds == pytest.approx(TARGET.seconds(*chunk_rows(num_computed, size)))
        num_computed, spec = num_computed + size, None


def test_a_prompt_that_was_found_cached_does_not_make_others_seem_cheap() -> None:
    """Where most of each prompt was, one that was not was expected to take a twentieth of its time."""
    cost = CostModel(CostProfile(target=TARGET))
    calls, expected_s = VerifyCalls(cost), cost.call_parts(NO_ROWS, chunk_rows(0, 500), drafted=False).seconds
    for order in range(60):
        newcomer = request(order, State.PREFILLING, prompt=500, computed=0)
        call = calls.build([], {}, [(newcomer, 500)], NOW)
        assert call is not None
        found = PrefillProgress(request_id=newcomer.request_id, num_computed=500, num_cached=480)
        sent = calls.answered(VerifyResult(call_id=call.call_id, prefills=[found]))
        assert sent is not None
        cost.observe_call(sent.parts, TARGET.seconds(*chunk_rows(480, 20)))
    found_s = cost.call_parts(NO_ROWS, chunk_rows(0, 500), drafted=False).seconds
    assert found_s == pytest.approx(expected_s, rel=0.01)
