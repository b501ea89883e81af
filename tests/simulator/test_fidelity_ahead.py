"""Steps that are sent ahead, in the record of a run, in what is fitted to it, and in the simulation."""

from __future__ import annotations

import math
from functools import cache

import msgspec
import numpy as np
import pytest

from benchmarks.fidelity_record import CALIBRATION, FidelityRecord, ServedRun, to_json
from simulator.fidelity_fit import fit_profile
from simulator.hardware import Trips
from simulator.machine import Machine
from tests.simulator.known_machine import (
    FACTOR,
    STEP,
    TRIPS,
    calibrated_on,
    log,
    machine,
    record_of,
    served,
)

#: Of 0.8 ms and 0.1 ms for each request, in turn, half is the target's process's own.
AHEAD = msgspec.structs.replace(TRIPS, ahead_s=4e-4, ahead_request_s=5e-5)


@cache
def plain_runs(trips: Trips, *, ahead: bool) -> list[ServedRun]:
    """To be read only: several tests ask for the same."""
    return [
        served(machine(trips=trips), log(), "autoregressive", CALIBRATION, load, seed, ahead=ahead)
        for seed, load in ((1, 0.3), (2, 0.8))
    ]


def test_a_forward_begins_after_the_gap_and_not_before_its_call_came() -> None:
    one = Machine(collocated=False)
    assert one.verify(1, ready=1.0, seconds=0.5, gap_s=0.2) == pytest.approx(1.5)
    assert one.verify(2, ready=1.1, seconds=0.5, gap_s=0.2) == pytest.approx(2.2)
    assert one.verified(1) == pytest.approx(0.5)
    assert one.verify(3, ready=9.0, seconds=0.5, gap_s=0.2) == pytest.approx(9.5)


def test_what_is_between_forwards_sent_ahead_is_found() -> None:
    runs = plain_runs(AHEAD, ahead=True)
    steps = [step for run in runs for step in run.steps]
    ahead = [step for step in steps if step.ahead]
    assert len(ahead) > 0.8 * len(steps)
    fitted = fit_profile(record_of(runs))
    trips = fitted.profile.trips
    assert trips is not None
    for requests in (1, 3):
        assert trips.gap_s(requests) == pytest.approx(AHEAD.gap_s(requests), rel=0.1)
    assert fitted.factors["target"] == pytest.approx(FACTOR, rel=0.02)
    assert abs(fitted.error) < 0.02


def test_a_record_is_read_again_as_it_was_written() -> None:
    record = record_of(plain_runs(AHEAD, ahead=True))
    assert any(step.told for run in record.runs for step in run.steps)
    read = msgspec.json.decode(to_json(record), type=FidelityRecord)
    for run, again in zip(record.runs, read.runs, strict=True):
        assert again.steps == run.steps
        for one, other in zip(run.requests, again.requests, strict=True):
            assert one.receipt is not None
            assert other.receipt is not None
            # Simulated, there are no logits to be near each other.
            assert math.isinf(one.receipt.min_gap)
            assert other.receipt.min_gap > 1e300
            assert other.receipt.num_output_tokens == one.receipt.num_output_tokens


def test_where_nothing_was_sent_ahead_nothing_is_hidden() -> None:
    runs = plain_runs(AHEAD, ahead=False)
    assert not any(step.ahead for run in runs for step in run.steps)
    trips = fit_profile(record_of(runs)).profile.trips
    assert trips is not None
    # It is not known what would be hidden: nothing is taken to be.
    assert (trips.ahead_s, trips.ahead_request_s) == (trips.verify_s, trips.verify_request_s)
    assert trips.call_s(2, drafted=False) == pytest.approx(AHEAD.call_s(2, drafted=False), rel=0.1)


def test_a_few_steps_sent_ahead_tell_how_much_is_hidden() -> None:
    """Policies that draft send few: were those free, simulated ones would draft less than they do."""
    in_turn = msgspec.structs.replace(STEP, profile_s=4e-3, forward_s=5e-3, whole_s=7e-3)
    ahead = msgspec.structs.replace(in_turn, whole_s=6e-3, ahead=True)
    trips = fit_profile(calibrated_on([in_turn] * 50 + [ahead] * 4)).profile.trips
    assert trips is not None
    assert trips.call_s(1, drafted=False) == pytest.approx(2e-3, rel=1e-6)
    assert trips.gap_s(1) == pytest.approx(1e-3, rel=1e-6)


def test_sending_ahead_hides_all_but_the_gap() -> None:
    def between(trips: Trips, *, ahead: bool) -> float:
        steps = [step for run in plain_runs(trips, ahead=ahead) for step in run.steps[1:]]
        return float(np.median([step.whole_s - step.forward_s for step in steps if step.num_requests == 1]))

    assert between(AHEAD, ahead=True) == pytest.approx(AHEAD.gap_s(1), rel=0.1)
    assert between(TRIPS, ahead=True) == pytest.approx(0.0, abs=1e-5)
    assert between(AHEAD, ahead=False) == pytest.approx(AHEAD.call_s(1, drafted=False), rel=0.1)
