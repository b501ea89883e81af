"""The figures of `bench grpc-cancel`, from trials made up here."""

from __future__ import annotations

from benchmarks.grpc_cancel import WAYS, Trial, summarise


def test_lost_requests_are_counted_by_way_and_have_no_time() -> None:
    trials = [
        Trial("close", 4.0),
        Trial("close", None, num_cancelled=1),
        Trial("close", None, num_cancelled=0),
        Trial("close", 9.0),
        Trial("Cancel", 2.0, num_cancelled=1),
    ]
    rows = {row["way"]: row for row in summarise(trials)}
    assert list(rows) == list(WAYS)
    assert rows["close"] == {
        "way": "close",
        "trials": 4,
        "lost": 2,
        "lost_then_cancelled": 1,
        "freed_ms_p50": 6.5,
        "freed_ms_max": 9.0,
    }
    assert rows["Cancel"]["lost"] == 0
    assert rows["deadline"] == {
        "way": "deadline",
        "trials": 0,
        "lost": 0,
        "lost_then_cancelled": 0,
        "freed_ms_p50": None,
        "freed_ms_max": None,
    }
