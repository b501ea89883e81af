"""Figures of an overload, from attempts written down by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import overload
from benchmarks.cli import app
from benchmarks.load_client import Outcome
from benchmarks.overload import OverloadOptions, asked
from benchmarks.overload_load import Arrival, Attempt, Phases
from benchmarks.overload_summary import lateness, recovery_s, refusals, summary
from tests.benchmarks.fake_server import FakeServer, serving

PHASES = Phases({"greedy": 2.0, "other": 2.0}, "greedy", 20.0, 10.0, 10.0, 10.0)


def attempt(at_s: float, arrival: int, number: int = 0, **changes: Any) -> Attempt:
    fields: dict[str, Any] = {
        "key": "other",
        "tier": "standard",
        "attained": True,
        "num_tokens": 10,
    } | changes
    return Attempt(number=number, sent_s=at_s, arrival=arrival, **fields)


def refused(at_s: float, arrival: int, number: int, told_s: float) -> Attempt:
    return attempt(at_s, arrival, number, is_refused=True, attained=False, told_s=told_s, num_tokens=0)


def test_refusals_are_true_if_the_client_is_taken_when_it_comes_back() -> None:
    attempts = [
        refused(12.0, 1, 0, 2.0),
        attempt(14.0, 1, 1),
        refused(13.0, 2, 0, 3.0),
        refused(16.0, 2, 1, 4.0),
    ]
    found = refusals(attempts)
    assert (found["num_refused"], found["num_came_back"], found["num_taken_then"]) == (3, 2, 1)
    assert (found["told_s_median"], found["told_s_most"]) == (3.0, 4.0)
    assert found["could_s_median"] == pytest.approx(1.5)  # 2 s and 1 s before the one taken at 14 s


def test_how_late_requests_were_sent_is_told() -> None:
    """Latency counts from sending: a client that is behind would hide what those due meanwhile waited."""
    arrivals = [Arrival(1.0, "other", "batch"), Arrival(2.0, "other", "batch")]
    attempts = [attempt(1.25, 0), attempt(4.0, 1), attempt(9.0, 1, number=1)]
    found = lateness(attempts, arrivals)
    assert (found["median"], found["most"]) == (1.125, 2.0)
    assert lateness([], arrivals)["most"] is None


def test_recovery_ends_with_the_last_that_was_refused_or_late() -> None:
    attempts = [
        attempt(21.0, 1, attained=False),
        refused(23.5, 2, 0, 1.0),
        attempt(24.0, 3),
        attempt(29.0, 4),
    ]
    assert recovery_s(attempts, PHASES) == pytest.approx(3.5)
    assert recovery_s([attempt(5.0, 0, attained=False), *attempts[2:]], PHASES) == 0.0


def test_who_is_late_to_the_end_has_not_recovered() -> None:
    attempts = [attempt(22.0, 1), attempt(29.0, 2, attained=False)]
    assert recovery_s(attempts, PHASES) is None
    assert recovery_s([attempt(5.0, 0)], PHASES) is None


def test_no_more_is_said_than_was_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds do not show that a system never recovers; what failed is named."""
    attempts = [attempt(5.0, 0), attempt(29.0, 1, attained=False, error="it broke [off]")]
    record = {
        **summary(attempts, PHASES),
        "phases": asdict(PHASES),
        "saturated_rate": 8.0,
        "client_late_s": lateness(
            attempts, [Arrival(5.0, "other", "batch"), Arrival(29.0, "other", "batch")]
        ),
    }
    monkeypatch.setattr(overload, "run", lambda options: record)
    result = CliRunner().invoke(app, ["overload"])
    assert result.exit_code == 0, result.output
    assert (
        "All on time after the overload: not in 10 s, of other keys not in 10 s; 1 failed." in result.output
    )
    assert "it broke [off]" in result.output


def test_the_refused_count_as_missed_of_those_sent() -> None:
    attempts = [
        attempt(11.0, 1),
        attempt(12.0, 2, attained=False),
        refused(13.0, 3, 0, 1.0),
        attempt(14.0, 3, 1),
    ]
    found = summary(attempts, PHASES)
    during = found["keys"]["other"]["during"]
    assert (during["num_sent"], during["num_refused"]) == (3, 1)
    assert during["attained_of_taken"] == pytest.approx(1 / 2)
    assert during["attained_of_sent"] == pytest.approx(1 / 3)
    assert found["tokens_during"] == {"greedy": 0, "other": 30}
    assert found["keys"]["other"]["before"]["attained_of_sent"] is None


def test_load_is_what_was_asked_for() -> None:
    phases = OverloadOptions(times=4.0, minutes=2.0, before_s=100.0, after_s=100.0).phases(10.0)
    arrivals = phases.arrivals(3)
    rates = {
        phase: sum(phases.of(one.at_s) == phase for one in arrivals) / length
        for phase, length in (("before", 100.0), ("during", 120.0), ("after", 100.0))
    }
    assert rates["before"] == pytest.approx(8.0, rel=0.2)
    assert rates["during"] == pytest.approx(40.0, rel=0.1)
    assert rates["after"] == pytest.approx(8.0, rel=0.2)
    assert arrivals == phases.arrivals(3)
    others = [one for one in arrivals if one.key == "one"]
    assert len(others) == pytest.approx(2.0 * 320, rel=0.2)
    with pytest.raises(ValueError, match="no more than the usual load"):
        OverloadOptions(times=0.5)


def test_a_few_prompts_are_of_all_classes() -> None:
    """Saturation is measured with those that come first, and answers of one class are five times as long."""
    counts = Counter(prompt.domain for prompt in asked(0)[:60])
    assert len(counts) == 3
    assert min(counts.values()) >= 10
    assert asked(0) == asked(0) != asked(1)


async def test_a_system_too_slow_to_measure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing_ends(*given: Any) -> tuple[float, list[Outcome]]:
        return 0.0, []

    monkeypatch.setattr(overload, "saturate", nothing_ends)
    async with serving(FakeServer(lambda body: ["a"])) as url:
        with pytest.raises(RuntimeError, match="make --saturation-s longer"):
            await overload._measured(OverloadOptions(), url, dict.fromkeys(overload.KEYS, "key"))
