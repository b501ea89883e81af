"""What is worked out for a whole batch at once, against each request by itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.call_parts import NO_ROWS, Rows
from cluster.cost_model import CostModel, CostProfile
from cluster.linear_cost import LinearCost
from cluster.policies import horizon
from cluster.policies.base import DecodeRequest
from cluster.policies.horizon import required_by, required_tokens
from cluster.requests import TRANSITIONS, IllegalTransition, Request, State, Trigger, advance_all
from cluster.stream_messages import Submit
from engine.sampling_params import SamplingParams


@st.composite
def requests(draw: st.DrawFn) -> DecodeRequest:
    """With or without an objective, ahead of it or late."""
    return DecodeRequest(
        request_id="r",
        drafter="d",
        num_decoded=draw(st.integers(0, 400)),
        decoding_s=draw(st.floats(0.0, 20.0)),
        tpot_s=draw(st.none() | st.floats(1e-3, 0.5)),
        max_draft=8,
        max_width=1,
        num_context=100,
        rate=0.5,
        num_remaining=draw(st.integers(0, 500)),
    )


@given(st.lists(requests(), min_size=1, max_size=6))
@pytest.mark.parametrize("z", [-1.28, 0.0, 1.64])
def test_what_many_requests_need_is_what_each_needs(z: float, batch: list[DecodeRequest]) -> None:
    batch = batch * horizon.FEW_REQUESTS  # so many that they are looked at together
    assert required_by(batch, 0.03, z).tolist() == [required_tokens(one, 0.03, z) for one in batch]


@given(st.integers(1, 64), st.integers(1, 4), st.integers(0, 12), st.integers(0, 5000))
def test_draft_times_by_depth_are_those_of_each_depth(n: int, width: int, deepest: int, context: int) -> None:
    cost = CostModel(
        CostProfile(
            target=LinearCost(delta=1e-2),
            drafters={"d": LinearCost(alpha=2e-8, gamma=1e-5, rho=1e-5, delta=2e-3)},
        )
    )
    for depth in (1, 4):
        cost.observe_draft("d", cost.layers_seconds("d", n, width, depth), 0.01)
    cost.observe_call(cost.call_parts(Rows(1, 1), NO_ROWS, drafted=False), 0.02)
    expected = [cost.draft_seconds("d", n, width, depth, context) for depth in range(deepest + 1)]
    assert cost.draft_seconds_by_depth("d", n, width, deepest, context) == pytest.approx(expected)


@pytest.mark.parametrize("trigger", Trigger)
@pytest.mark.parametrize("state", State)
def test_many_requests_move_as_one_does(state: State, trigger: Trigger) -> None:
    made = []
    for number in range(2):
        submit = Submit(request_id=f"r{number}", prompt=[1], sampling=SamplingParams())
        made.append(Request(submit, "client", 0.0, number, state=state))
    target = TRANSITIONS.get((state, trigger))
    if target is None:
        with pytest.raises(IllegalTransition, match="r0"):
            advance_all(made, trigger)
    else:
        advance_all(made, trigger)
        assert [request.state for request in made] == [target, target]
