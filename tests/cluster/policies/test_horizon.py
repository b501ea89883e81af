"""The chance constraint against simulation, and its limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from cluster.policies.base import DecodeRequest
from cluster.policies.horizon import HORIZON_TOKENS, quantile, required_tokens
from tests.cluster.policies.batches import request


def late(tpot_s: float, **changes: object) -> DecodeRequest:
    return request(tpot_s=tpot_s, num_decoded=10, decoding_s=10 * tpot_s, **changes)


@pytest.mark.parametrize("miss", [0.05, 0.1, 0.3, 0.7, 0.9])
@pytest.mark.parametrize("slowness", [1.2, 1.5, 2.0])
def test_the_mean_it_asks_for_is_on_time_about_as_often_as_promised(miss: float, slowness: float) -> None:
    """Geometric numbers of tokens per step with that mean, summed over the steps there is time for."""
    lagging = late(0.01)
    mean = required_tokens(lagging, slowness * 0.01, quantile(miss))
    steps = HORIZON_TOKENS / slowness
    rng = np.random.default_rng(0)
    tokens = rng.geometric(1.0 / mean, (20_000, int(steps))).sum(axis=1) + (steps % 1.0) * mean
    on_time = float((tokens >= HORIZON_TOKENS).mean())
    assert on_time == pytest.approx(1.0 - miss, abs=0.07)


def test_without_a_margin_it_is_the_rate_that_the_time_left_asks_for() -> None:
    assert required_tokens(late(0.01), 0.02, 0.0) == pytest.approx(2.0)


@given(
    tpot_ms=st.floats(1, 100),
    step_ms=st.floats(1, 100),
    slack=st.floats(-0.5, 0.5),
    decoded=st.integers(0, 200),
    remaining=st.integers(1, 200),
    z=st.floats(-2, 2),
)
@example(tpot_ms=1.0, step_ms=40.0, slack=0.0, decoded=0, remaining=50, z=-1.5)  # z^2 exceeds the steps
@example(tpot_ms=1.0, step_ms=2.0, slack=0.0, decoded=0, remaining=3, z=0.0)  # a root of less than zero
def test_it_asks_for_more_when_later_or_surer_and_never_for_more_than_the_horizon(
    tpot_ms: float, step_ms: float, slack: float, decoded: int, remaining: int, z: float
) -> None:
    tpot, step = tpot_ms / 1e3, step_ms / 1e3
    decoding = max(0.0, decoded * tpot * (1.0 + slack))
    horizon = min(HORIZON_TOKENS, remaining)
    steps = (tpot * (decoded + horizon) - decoding) / step
    assume(steps >= 1.0)

    def ask(extra_s: float, z: float) -> float:
        view = request(
            tpot_s=tpot, num_decoded=decoded, decoding_s=decoding + extra_s, num_remaining=remaining
        )
        return required_tokens(view, step, z)

    asked = ask(0.0, z)
    assert 0.0 <= asked <= horizon
    if steps >= horizon:
        assert asked == 0.0
        return
    assert asked >= (horizon / steps if z >= 0.0 else 1.0) - 1e-9
    assert ask(0.0, z + 0.3) >= asked - 1e-9
    later = min(0.3 * step, (steps - 1.0) * step)
    assert ask(later * 0.999, z) >= asked - 1e-9


def test_no_objective_asks_for_nothing_and_no_time_for_what_adaserve_asks() -> None:
    assert required_tokens(request(tpot_s=None), 0.02, 1.3) == 0.0
    hopeless = request(tpot_s=0.01, num_decoded=10, decoding_s=5.0)
    assert required_tokens(hopeless, 0.02, 1.3) == hopeless.required(0.02)


@pytest.mark.parametrize("probability", [0.0, 1.0, -0.1, 2.0])
def test_a_miss_probability_is_a_probability(probability: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        quantile(probability)
