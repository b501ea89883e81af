"""The verdicts of a soak run: the fit against scipy and by simulation, leaks planted and not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.live_load import Ended
from benchmarks.live_system import Scrape, role_of
from benchmarks.soak import Samples, answers_are_full, counts, fits, leaks
from benchmarks.soak_verdict import by_minute, fit, latency_change


def test_the_fit_is_that_of_scipy_where_residuals_alternate() -> None:
    # Residuals that do not follow each other widen nothing: then it is the textbook's interval.
    times = np.arange(40.0)
    values = 3.0 + 0.5 * times + np.where(np.arange(40) % 2 == 0, 1.0, -1.0)
    found, wanted = fit(list(times), list(values)), stats.linregress(times, values)
    reach = stats.t.ppf(0.975, 38) * wanted.stderr
    assert found.value == pytest.approx(wanted.slope)
    assert (found.low, found.high) == pytest.approx((wanted.slope - reach, wanted.slope + reach))


def test_the_interval_covers_the_truth_as_often_as_it_says_although_samples_hang_together() -> None:
    rng = np.random.default_rng(5)
    times = list(np.linspace(0.0, 1.0, 240))
    covered = textbook = 0
    for _ in range(200):
        noise = np.zeros(240)
        for at in range(1, 240):
            noise[at] = 0.8 * noise[at - 1] + rng.normal()
        found = fit(times, list(2.0 * np.array(times) + noise))
        covered += found.low <= 2.0 <= found.high
        plain = stats.linregress(times, 2.0 * np.array(times) + noise)
        textbook += abs(plain.slope - 2.0) <= 1.97 * plain.stderr
    assert covered >= 0.88 * 200
    assert textbook < 0.75 * 200, "the samples hang together too little to test anything"


def test_a_verdict_needs_an_interval_on_one_side_of_the_limit() -> None:
    times = list(np.linspace(0.0, 1.0, 60))
    wobble = [0.2 * (-1.0) ** at for at in range(60)]
    assert (
        fit(times, [100.0 + 30.0 * t + w for t, w in zip(times, wobble, strict=True)]).verdict(8.0) == "grows"
    )
    assert fit(times, [100.0 + w for w in wobble]).verdict(8.0) == "flat"
    assert fit(times[:4], [100.0, 108.0, 99.0, 107.0]).verdict(8.0) == "too short to say"
    assert fit([0.0, 1.0, 2.0], [5.0, 5.0, 5.0]).verdict(0.0) == "flat"
    with pytest.raises(ValueError, match="three samples"):
        fit([0.0, 1.0], [1.0, 2.0])


def ended(sent_s: float, tpot_ms: float) -> Ended:
    return Ended("code", sent_s, sent_s + 1.0, 10.0 * tpot_ms, tpot_ms, tpot_ms < 6.0, 10, ())


def test_latency_of_the_ends_is_compared() -> None:
    level = [ended(float(at), 5.0) for at in range(300)]
    assert latency_change(level, 0.0, 300.0, 100.0)["within"] is True
    rising = [ended(float(at), 5.0 if at < 150 else 5.3) for at in range(300)]
    found = latency_change(rising, 0.0, 300.0, 100.0)
    assert found["tpot_ms"]["change"] == pytest.approx(0.06)
    assert found["within"] is False
    falling = [ended(float(at), 5.0 if at < 150 else 4.0) for at in range(300)]
    assert latency_change(falling, 0.0, 300.0, 100.0)["within"] is True, "faster is no fault"
    assert latency_change([], 0.0, 300.0, 100.0)["within"] is None
    assert [(one["minute"], one["requests"], one["attained"]) for one in by_minute(level, 0.0)] == [
        (minute, 60, 1.0) for minute in range(5)
    ]


def samples(role: str, mb_per_hour: float) -> Samples:
    found = Samples()
    for at in range(120):
        memory = 200.0 + mb_per_hour * at * 30.0 / 3600.0 + 0.1 * (-1.0) ** at
        sample = {"time_s": at * 30.0, "private_mb": memory, "pss_mb": memory, "fds": 40.0, "threads": 9.0}
        found.processes.setdefault((role, 17), []).append(sample)
    return found


def record(
    role: str = "scheduler", mb_per_hour: float = 0.0, left: float = 0.0, verifiers: int = 1
) -> dict[str, Any]:
    seen = samples(role, mb_per_hour)
    before = {"drafter": 2, "verifier": 1, "scheduler": 1, "front_end": 2, "directory": 1}
    return {
        "memory": fits(seen, 600.0, 8.0),
        "counts": counts(seen, 600.0),
        "idle": {
            "before": {"left": {}, "processes": before},
            "after": {
                "left": {"running": left},
                "processes": {**before, "verifier": verifiers, "drafter": 3},
            },
        },
    }


def test_leaks_are_named() -> None:
    assert leaks(record()) == []
    assert leaks(record("Ray", 90.0)) == [], "Ray's own processes are not ours to answer for"
    (grows,) = leaks(record(mb_per_hour=90.0))
    assert grows.startswith("scheduler 17 grows by 90.0 MB/hour")
    assert leaks(record(left=2.0)) == ["running: 2 left when idle"]
    assert leaks(record(verifiers=3)) == ["verifier: 1 processes before the load, 3 after it"]
    assert [one["fds_most"] for one in record()["counts"]] == [40.0]


@pytest.mark.parametrize(("late_ms", "code"), [(5.0, 0), (5.3, 1)])
def test_why_a_run_is_not_sound_is_said(late_ms: float, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = record()
    for when in seen["idle"].values():
        when |= {"kv_use": 0.0, "series": 9}
    names = ("requests", "turned_away", "lost", "duplicated", "missing", "differing", "refused")
    of = [ended(float(at), 5.0 if at < 150 else late_ms) for at in range(300)]
    seen |= {
        "answers": dict.fromkeys(names, 0),
        "num_unproven": 0,
        "requests_per_s": 1.0,
        "latency": latency_change(of, 0.0, 300.0, 100.0),
    }
    monkeypatch.setattr("benchmarks.soak.run", lambda options: seen)
    result = CliRunner().invoke(app, ["soak"])
    assert (result.exit_code, "Latency rose by more than 5%" in result.output) == (code, code == 1)


def test_front_ends_are_judged_once_they_keep_all_answers_they_may() -> None:
    def verdict(seen: Samples, full_s: float) -> str:
        seen.system = [{"time_s": at * 30.0, "answers_full": at * 30.0 >= full_s} for at in range(120)]
        return str(fits(seen, 600.0, 8.0)[0]["verdict"])

    filling = samples("front_end", 0.0)  # for half an hour, at 120 MB per hour
    for sample in filling.processes["front_end", 17]:
        sample["private_mb"] += min(sample["time_s"], 1800.0) / 30.0
    assert verdict(filling, 0.0) != "flat"
    assert verdict(filling, 1800.0) == "flat"
    assert verdict(filling, math.inf) == "too short to say"
    assert verdict(samples("front_end", 90.0), 900.0) == "grows"
    assert verdict(samples("scheduler", 90.0), math.inf) == "grows", "others keep no answers"


def test_answers_are_full_when_every_front_end_drops_some() -> None:
    metric = "flotilla_idempotent_answers_dropped_total"

    def scrape(**dropped: tuple[int, int, int]) -> Scrape:
        return Scrape.of(
            f"# TYPE {metric} counter\n"
            + "".join(
                f'{metric}{{front_end="{front_end}",reason="{reason}"}} {number}\n'
                for front_end, numbers in dropped.items()
                for reason, number in zip(("ttl", "memory", "abandoned"), numbers, strict=True)
            )
        )

    assert answers_are_full(scrape(a=(0, 3, 0), b=(1, 0, 0)))
    assert not answers_are_full(scrape(a=(0, 3, 0), b=(0, 0, 5)))
    assert not answers_are_full(scrape())


def test_processes_are_told_apart_by_their_titles() -> None:
    assert role_of("ray::DrafterWorker.prepare") == "drafter"
    assert role_of("ray::ServeReplica:flotilla:Cell") == "scheduler"
    assert role_of("ray::ServeReplica:flotilla:FrontEnd.handle_request") == "front_end"
    starting = "ray::SERVE_REPLICA::flotilla#Cell#f93rhph7:ServeReplica:flotilla:Cell.__init__"
    assert role_of(starting) == "scheduler"
    assert role_of("python -m pytest DrafterWorker") == "Ray"
    assert role_of("ray::ServeController.listen_for_change") == "Serve controller"
    assert role_of("ray::IDLE") == role_of("/usr/bin/raylet --port 1") == "Ray"


def test_only_members_that_answer_and_serve_count() -> None:
    scrape = Scrape.of(
        "# TYPE flotilla_member_scraped gauge\n"
        'flotilla_member_scraped{kind="cell",member="a"} 1\n'
        'flotilla_member_scraped{kind="cell",member="b"} 0\n'
        'flotilla_member_scraped{kind="cell",member="c"} 1\n'
        'flotilla_member_scraped{kind="front_end",member="f"} 1\n'
        "# TYPE flotilla_ready gauge\n"
        'flotilla_ready{cell="a"} 1\n'
        'flotilla_ready{cell="c"} 0\n'
    )
    assert scrape.members("cell") == {"a"}
    assert scrape.members("front_end") == {"f"}
    assert scrape.total("flotilla_ready") == 1.0
    assert scrape.total("flotilla_member_scraped", kind="cell") == 2.0
