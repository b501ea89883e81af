"""Pauses, throughput and attainment around a kill, from timelines whose answers are known."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.kill_recovery import (
    Kill,
    Throughput,
    assess,
    attainment,
    by_role,
    longest_gap,
    unexplained_breaks,
)
from benchmarks.kills import Killer, KillOptions, parse_roles
from benchmarks.live_client import End
from benchmarks.live_load import Ended
from benchmarks.live_system import SystemOptions
from cluster.config import FlotillaConfig


def ended(sent_s: float, ended_s: float, attained: bool = True, how: End = "answered") -> Ended:
    attempts = ((sent_s, (sent_s + ended_s) / 2, ended_s, how),)
    return Ended("code", sent_s, ended_s, 1.0, 1.0, attained, 10, attempts)


@given(
    st.lists(st.integers(0, 300), min_size=2, max_size=30).map(sorted),
    st.integers(0, 300),
    st.integers(0, 99),
)
def test_the_longest_gap_is_that_of_trying_all(times: list[int], begin: int, length: int) -> None:
    gaps = [(one, two) for one, two in itertools.pairwise(times) if two >= begin and one <= begin + length]
    found = longest_gap([float(at) for at in times], begin, begin + length)
    assert (found is None) == (not gaps)
    if found is not None:
        assert found in gaps
        assert found[1] - found[0] == max(two - one for one, two in gaps)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 9)), max_size=30), st.integers(0, 90))
def test_tokens_in_a_window_are_those_of_counting(pairs: list[tuple[int, int]], begin: int) -> None:
    pairs.sort()
    counted = sum(tokens for at, tokens in pairs if begin <= at < begin + 10)
    assert Throughput((float(at), tokens) for at, tokens in pairs).tokens(begin, begin + 10) == counted


def steady(begin: float, end: float, rate: float) -> list[tuple[float, int]]:
    """One token at a time."""
    number = round((end - begin) * rate)
    return [(begin + at / rate, 1) for at in range(number)]


def test_a_pause_and_a_slow_beginning_are_seen_as_such() -> None:
    # Killed at 100; silence to 102.5; half the tokens to 106; then all of them.
    timeline = [*steady(50, 100, 20), *steady(102.5, 106, 10), *steady(106, 140, 20)]
    kill = Kill(100.0, "verifier", 1, "verifier", until_s=140.0)
    assess([kill], Throughput(timeline), [], usual_rate=20.0, usual_gap_s=0.2, one_cell=True)
    assert kill.pause_s == pytest.approx(2.55, abs=0.06)
    assert kill.first_token_s == pytest.approx(2.5)
    # A window of 3 s reaches 90 % as soon as at most 0.6 s of it are slow.
    assert kill.throughput_s == pytest.approx(5.4, abs=0.11)


def test_nothing_noticed_is_no_pause() -> None:
    kill = Kill(100.0, "drafter", 1, "general", until_s=120.0)
    assess([kill], Throughput(steady(50, 130, 20)), [], usual_rate=20.0, usual_gap_s=0.2, one_cell=True)
    assert kill.pause_s == pytest.approx(0.05)
    assert kill.throughput_s == 0.0
    assert kill.first_token_s is None, "only drafts tell, and the metrics show those"


def test_what_does_not_come_back_before_the_next_kill_has_no_time() -> None:
    kill = Kill(100.0, "scheduler", 1, "scheduler", until_s=120.0)
    timeline = [*steady(50, 100, 20), *steady(103, 130, 10)]
    assess([kill], Throughput(timeline), [], usual_rate=20.0, usual_gap_s=0.2, one_cell=False)
    assert kill.throughput_s is None
    assert kill.first_token_s is None, "with several cells a token may have come from any"
    assert by_role([kill])["scheduler"]["throughput_s"] == {"median": None, "p95": None, "missing": 1}


def test_after_a_front_end_only_attempts_begun_later_count() -> None:
    kill = Kill(100.0, "front_end", 1, "front_end", until_s=120.0)
    requests = [ended(99.0, 101.2), ended(100.5, 103.5)]
    assess([kill], Throughput(steady(50, 130, 20)), requests, usual_rate=20.0, usual_gap_s=0.2, one_cell=True)
    assert kill.first_token_s == pytest.approx(2.0)


def test_attainment_by_whether_a_kill_was_near() -> None:
    kills = [Kill(100.0, "verifier", 1, "v"), Kill(120.0, "front_end", 2, "f")]
    requests = [ended(99.0, 99.5), ended(99.0, 100.5, False), ended(109.0, 112.0), ended(119.0, 121.0, False)]
    found = attainment(requests, kills)
    assert found["by_time"]["code"]["after"] == {"requests": 1, "attained": 1.0}
    assert found["by_time"]["code"]["during"] == {"requests": 3, "attained": pytest.approx(1 / 3)}
    assert found["by_role"]["verifier"]["code"] == {"requests": 2, "attained": 0.5}
    assert found["by_role"]["front_end"]["code"] == {"requests": 1, "attained": 0.0}


def test_a_connection_may_break_only_while_a_front_end_is_away() -> None:
    kills = [
        Kill(100.0, "front_end", 1, "f", replaced_s=3.0),
        Kill(120.0, "verifier", 2, "v", replaced_s=2.0),
    ]
    requests = [ended(99.0, at, how="broken") for at in (99.5, 100.0, 103.9, 104.1, 120.5)]
    assert unexplained_breaks([*requests, ended(99.0, 130.0)], kills) == 3


def test_median_and_95th_percentile_by_role() -> None:
    kills = [Kill(0.0, "drafter", n, "d", replaced_s=float(n)) for n in range(1, 22)]
    found = by_role(kills)["drafter"]["replaced_s"]
    assert found == {"median": 11.0, "p95": 20.0, "missing": 0}


def test_roles_that_do_not_exist_are_named() -> None:
    assert parse_roles("verifier, drafter") == ("verifier", "drafter")
    with pytest.raises(ValueError, match="only drafter, verifier"):
        parse_roles("verifier,router")
    for every_s in (1.0, float("nan")):
        with pytest.raises(ValueError, match="at least 4 s"):
            KillOptions(every_s=every_s)


def test_of_a_configuration_file_it_is_recorded_what_that_says(tmp_path: Path) -> None:
    """It was the command's own options, which had not been served."""
    own = SystemOptions(cells=2, policy="fixed").record()
    assert (own["cells"], own["front_ends"], own["policy"], own["config"]) == (2, 2, "fixed", None)
    path = tmp_path / "cell.yaml"
    path.write_text("target: {path: zoo:target-8x384}\npolicy: {name: smartspec}\n")
    found = SystemOptions(cells=2, policy="fixed", config=path).record()
    assert found.keys() == own.keys()
    assert (found["cells"], found["front_ends"], found["policy"]) == (1, 1, "smartspec")
    assert found["config"] == str(path)


def test_several_cells_can_be_served(tmp_path: Path) -> None:
    """The options asked for `http.admin`, which is refused then."""
    path = tmp_path / "cells.yaml"
    path.write_text("target: {path: zoo:target-8x384}\nscaling: {cells: {min: 2, max: 2}}\n")
    for options in (SystemOptions(cells=2), SystemOptions(config=path)):
        served = FlotillaConfig.model_validate(options.served().model_dump(mode="json"))
        assert served.scaling.cells.min == 2


async def test_a_drafter_is_back_once_every_cell_has_it() -> None:
    """Any one cell answers: the other's drafter, of the same name, was there all the time."""
    answers = [
        [("small", "busy", 12), ("other", "ready", 13)],
        [("small", "restarting", None)],
        [("small", "ready", 11)],  # from before it was known to be dead
        [("small", "ready", 12)],
        [("small", "ready", 14)],
    ]
    told = iter(answers)

    async def drafters(_session: object) -> list[dict[str, object]]:
        return [{"worker": name, "state": state, "pid": pid} for name, state, pid in next(told)]

    cells = SimpleNamespace(min=2)
    config = SimpleNamespace(scaling=SimpleNamespace(cells=cells))
    killer = Killer(
        cast(Any, SimpleNamespace(drafters=drafters, config=config)), cast(Any, None), KillOptions()
    )
    kill, serving = Kill(0.0, "drafter", 11, "small"), set[int]()
    found = [await killer._drafter_is_back(kill, serving) for _ in answers]
    assert found == [False, False, False, False, True]
