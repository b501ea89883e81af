"""`flotilla bench pipeline`: what is compared with what, and the plot of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.pipeline import AUTO, NO_OVERLAP, PLAIN, SPIN, Measured, settings, show, summary
from benchmarks.pipeline_plot import draw
from benchmarks.tables import console
from deployments.demo import demo_config

GOODPUT = {
    PLAIN: 900.0,
    NO_OVERLAP: 1000.0,
    "1": 1100.0,
    "2": 1200.0,
    "3": 1150.0,
    SPIN: 1130.0,
    AUTO: 1210.0,
}
CALLS = {SPIN: {1: 5, 3: 40}, AUTO: {1: 9, 2: 30}}


def measured() -> dict[str, Measured]:
    return {
        name: Measured([rate, rate - 50, rate + 50], CALLS.get(name, {})) for name, rate in GOODPUT.items()
    }


def test_the_heuristic_is_judged_by_the_count_it_picks() -> None:
    found = summary(measured())
    assert found["best_count"] == 2
    assert found["chosen"][SPIN]["count"] == 3
    assert found["heuristic_of_best"] == pytest.approx(1150 / 1200)
    assert found["heuristic_is_near_best"]
    assert found["gain_over_no_overlap"] == pytest.approx(1.21)
    assert found["gain_is_enough"]


def test_what_the_heuristic_has_is_told_apart_from_what_its_count_has() -> None:
    """It may switch all the time between counts, of which the one it takes most often is the best."""
    with console.capture() as shown:
        show({"batches": {"8": summary(measured())}})
    told = " ".join(shown.get().split())
    assert "SPIN's heuristic has 0.942 of the best count's goodput" in told
    assert "mostly takes 3, which set by hand has 0.958 (at least 0.95)" in told


def test_every_setting_sets_the_same_fields() -> None:
    named = settings(demo_config(), 6, "flotilla")
    assert {str(count) for count in range(1, 7)} | {PLAIN, NO_OVERLAP, SPIN, AUTO} == named.keys()
    assert {(tuple(policy), tuple(scheduler)) for policy, scheduler in named.values()} == {
        (("name",), ("micro_batches", "draft_ahead"))
    }
    assert named[NO_OVERLAP][1] == {"micro_batches": 1, "draft_ahead": 0}


def test_it_is_drawn(tmp_path: Path) -> None:
    draw({"batches": {"8": summary(measured()), "16": summary(measured())}}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000
