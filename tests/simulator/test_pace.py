"""Phases of a machine are as long and as strong as said, and are found again in what forwards took."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulator import systems
from simulator.noise import normal
from simulator.pace import PHASES_S, Pace, Phase, fit_pace
from simulator.run import Cell, Options
from tests.simulator.sim_requests import one_request, small_profile

SHORT, LONG = Phase(std=0.15, seconds=0.03), Phase(std=0.1, seconds=3.0)
FORWARD_S = 0.006


def watched(phases: list[Phase], count: int, key: int = 1, every_s: float = FORWARD_S) -> np.ndarray:
    """Logarithms of the pace, asked every so many seconds."""
    pace = Pace(phases, key)
    return np.log([pace.at(every_s * number) for number in range(count)])


@pytest.mark.parametrize("seconds", [0.1, 1.0])
def test_on_average_forwards_that_follow_one_another_take_as_long_as_without(seconds: float) -> None:
    pace, now_s, factors = Pace([Phase(std=0.4, seconds=seconds)], 1), 0.0, []
    while now_s < 1000.0 * seconds:
        factors.append(pace.at(now_s))
        now_s += FORWARD_S * factors[-1]
    assert np.mean(factors) == pytest.approx(1.0, abs=0.06)


@pytest.mark.parametrize(
    ("phase", "every_s"),
    [
        (SHORT, FORWARD_S),
        (SHORT, 0.05),
        pytest.param(LONG, FORWARD_S, marks=pytest.mark.thorough),  # a million forwards
        (LONG, 0.05),
    ],
)
def test_a_phase_is_as_strong_and_as_long_as_said(phase: Phase, every_s: float) -> None:
    # Long enough for a thousand of them.
    count = int(2000 * max(phase.seconds, every_s) / every_s)
    logs = watched([phase], count, every_s=every_s)
    assert logs.std() == pytest.approx(phase.std, rel=0.1)
    lag = max(1, round(phase.seconds / every_s))
    deviation = logs - phase.std**2 / 2
    correlation = np.mean(deviation[lag:] * deviation[:-lag]) / phase.std**2
    assert correlation == pytest.approx(np.exp(-lag * every_s / phase.seconds), abs=0.1)


def test_a_key_fixes_it_and_time_that_stands_still_changes_nothing() -> None:
    assert (watched([SHORT, LONG], 500) == watched([SHORT, LONG], 500)).all()
    assert (watched([SHORT, LONG], 500) != watched([SHORT, LONG], 500, key=2)).all()
    pace = Pace([SHORT], 1)
    assert pace.at(0.5) == pace.at(0.5) != pace.at(0.51)
    assert [Pace([], 3).at(time) for time in (0.0, 1.0)] == [1.0, 1.0]


def test_phases_are_found_in_what_forwards_took() -> None:
    held = [Phase(std=0.15, seconds=PHASES_S[0]), Phase(std=0.1, seconds=PHASES_S[1])]
    runs = []
    for key in range(8):
        times = FORWARD_S * np.arange(4000)
        runs.append((times, watched(held, len(times), key) + 0.08 * normal(100 + key, 0, len(times))))
    phases, own = fit_pace(runs)
    found = {phase.seconds: phase.std for phase in phases}
    assert found[PHASES_S[0]] == pytest.approx(0.15, rel=0.1)
    assert found[PHASES_S[1]] == pytest.approx(0.1, rel=0.2)
    assert found.get(PHASES_S[2], 0.0) < 0.04
    assert own == pytest.approx(0.08, rel=0.15)


def test_forwards_that_vary_each_by_itself_have_no_phases() -> None:
    times = FORWARD_S * np.arange(20_000)
    phases, own = fit_pace([(times, 0.2 * normal(5, 0, len(times)))])
    assert sum(phase.std**2 for phase in phases) < 0.02 * 0.2**2
    assert own == pytest.approx(0.2, rel=0.03)


def test_one_forward_out_of_step_is_no_phase() -> None:
    logs = 0.1 * normal(5, 0, 3000)
    logs[1500] = 6.0
    phases, own = fit_pace([(FORWARD_S * np.arange(3000), logs)])
    assert sum(phase.std**2 for phase in phases) < 0.1 * 0.1**2
    assert own == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("runs", [[], [(np.zeros(0), np.zeros(0))], [(np.zeros(1), np.ones(1))]])
def test_without_forwards_nothing_is_found(runs: list[tuple[np.ndarray, np.ndarray]]) -> None:
    assert fit_pace(runs) == ([], 0.0)


@pytest.mark.thorough
def test_phases_part_requests_of_a_kind_and_noise_of_forwards_does_not() -> None:
    def times_per_token(jitter: float, pace: list[Phase]) -> np.ndarray:
        profile = small_profile(drafters={}, pace=pace)
        cell = Cell(profile, systems.parse("vllm"), Options(jitter=jitter))
        for number in range(60):
            cell.submit(replace(one_request(number, 65), arrival_s=10.0 * number))
        cell.run()
        return np.array([receipt.tpot_ms for _, receipt in cell.receipts.values()])

    known = times_per_token(0.0, []).mean()
    by_forward, by_phase = times_per_token(0.2, []), times_per_token(0.0, [Phase(std=0.2, seconds=3.0)])
    assert by_forward.mean() == pytest.approx(known, rel=0.02)
    assert by_phase.mean() == pytest.approx(known, rel=0.1)
    assert by_forward.std() < 0.05 * known < 0.12 * known < by_phase.std()
