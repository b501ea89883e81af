"""The figures of `bench overhead`, from timings made up here."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.engine_under_test import Task
from benchmarks.overhead import HTTP, STREAM, Figures, Timing, ask_all, summary


def figures(way: str, *rounds: tuple[float, float]) -> Figures:
    """Rounds of two answers of eleven tokens: (time to the first, time per token after it), milliseconds."""
    made = Figures(way, 16)
    for ttft_ms, tpot_ms in rounds:
        made.add([Timing(ttft_ms, ttft_ms + 10 * tpot_ms, 11)] * 2, seconds=2.0)
    return made


def test_what_a_way_adds_is_told_against_the_stream_at_the_same_concurrency() -> None:
    stream = figures(STREAM, (10.0, 4.0), (10.0, 5.0), (10.0, 8.0))
    http = figures(HTTP, (14.0, 4.4), (13.0, 6.0), (12.0, 8.0))
    base, row = summary([stream, http])
    assert base["tpot_ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert row["added_ttft_ms"] == pytest.approx(3.0)
    assert row["added_tpot_ms"] == pytest.approx(1.0)
    assert row["tpot_ratio"] == pytest.approx({"median": 1.1, "min": 1.0, "max": 1.2})
    assert row["median_tokens_per_s"] == pytest.approx(11.0)
    assert row["same_tokens"]


def test_time_per_token_counts_tokens_and_not_answers() -> None:
    made = Figures(STREAM, 1)
    made.add([Timing(5.0, 5.0, 1), Timing(5.0, 25.0, 21), Timing(5.0, 105.0, 11)], seconds=1.0)
    assert made.tpot_ms == [pytest.approx(120.0 / 30)]


def test_answers_of_one_token_have_no_time_per_token() -> None:
    with pytest.raises(ValueError, match="two tokens"):
        Figures(STREAM, 1).add([Timing(5.0, 5.0, 1)], seconds=1.0)


async def test_no_more_than_asked_for_run_at_once() -> None:
    running = most = 0

    async def ask(_: Task) -> Timing:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return Timing(1.0, 2.0, 2)

    timings, _ = await ask_all(ask, [Task("code", [1], 2)] * 9, concurrency=3)
    assert (len(timings), most) == (9, 3)
