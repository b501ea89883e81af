"""When a newcomer begins that others may pass: as queueing theory says, without jumps."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cluster.cost_model import DEFAULT_PROFILE, CostModel
from cluster.forecast import Forecast
from cluster.passing import Passing
from cluster.requests import Request, State
from cluster.stream_messages import Submit
from engine.sampling_params import SamplingParams

NUM_PLACES, APART = 8, 10


def running() -> list[Request]:
    """Requests of which one ends every `APART` tokens, and in their mean as long as one that passes."""
    found = []
    for number in range(1, NUM_PLACES + 1):
        sampling = SamplingParams(max_tokens=NUM_PLACES * APART)
        asked = Submit(request_id=f"r{number}", prompt=[1, 2, 3], sampling=sampling)
        request = Request(asked, "client", 0.0, number)
        request.state = State.VERIFYING
        request.output = [7] * (APART * (NUM_PLACES - number))
        found.append(request)
    return found


def start_s(passing: float) -> float:
    forecast = Forecast(CostModel(DEFAULT_PROFILE), 512, NUM_PLACES)
    return forecast.schedule(
        running(), (), is_full=True, drafts=False, starts_only=True, passing=Passing(passing)
    ).start_s


def test_without_others_it_takes_the_first_place_that_becomes_free() -> None:
    forecast = Forecast(CostModel(DEFAULT_PROFILE), 512, NUM_PLACES)
    schedule = forecast.schedule(running(), (), is_full=True, drafts=False)
    assert start_s(0.0) == schedule.start_s == schedule.ends_s[0] > 0.0


def test_whoever_passes_now_and_then_delays_a_little() -> None:
    first = start_s(0.0)
    assert first < start_s(0.05 / first) < 1.1 * first


@pytest.mark.parametrize("load", [0.2, 0.5, 0.7, 0.8])
def test_it_waits_the_longer_the_less_is_left_for_it(load: float) -> None:
    """A place becomes free every `first` seconds, and of those a share is taken by who passes."""
    first = start_s(0.0)
    assert start_s(load / first) == pytest.approx(first / (1.0 - load), rel=0.12)


def test_the_time_grows_steadily_with_their_number() -> None:
    first = start_s(0.0)
    starts = [start_s(load / 100 / first) for load in range(90)]
    assert all(before <= after for before, after in pairwise(starts))
    assert max(after - before for before, after in pairwise(starts[:70])) < 0.3 * first
    assert start_s(2.0 / first) > 20 * first
