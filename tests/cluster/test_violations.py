"""Whose fault a missed objective is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.metric_catalog import CAUSES
from cluster.stream_messages import Objective, Receipt
from cluster.violations import DecodeTimes, cause, causes, missed

USUAL = {"draft": 0.25, "verify": 0.6, "other": 0.15}


def receipt(**values: Any) -> Receipt:
    filled = {
        "queue_ms": 0.0,
        "ttft_ms": 50.0,
        "tpot_ms": 10.0,
        "e2e_ms": 1050.0,
        "num_prompt_tokens": 5,
        "num_cached_tokens": 0,
        "num_output_tokens": 101,
        "num_steps": 50,
        "num_drafted": 0,
        "num_verified": 0,
        "num_accepted": 0,
        "drafters": {},
        "num_preemptions": 0,
    }
    return Receipt(**filled | values)


@pytest.mark.parametrize(
    ("objective", "changes", "times", "expected"),
    [
        # 100 ms allowed: the prompt alone would have been in time, the queue made it late.
        (Objective(ttft_ms=100), {"queue_ms": 70, "ttft_ms": 150}, DecodeTimes(), {"ttft": "queue"}),
        # The prompt alone takes too long, whatever the queue.
        (Objective(ttft_ms=100), {"queue_ms": 20, "ttft_ms": 400}, DecodeTimes(), {"ttft": "prefill"}),
        (
            Objective(ttft_ms=100),
            {"queue_ms": 5, "ttft_ms": 400, "preempted_ms": (300.0, 0.0)},
            DecodeTimes(),
            {"ttft": "preempt"},
        ),
        # 1000 ms of decoding, 800 ms allowed: 200 ms of drafts, 480 ms of verification, 120 ms else.
        (Objective(tpot_ms=8), {}, DecodeTimes(draft_s=0.4, verify_s=0.5), {"tpot": "draft"}),
        (Objective(tpot_ms=8), {}, DecodeTimes(draft_s=0.2, verify_s=0.7), {"tpot": "verify"}),
        (Objective(tpot_ms=8), {}, DecodeTimes(draft_s=0.1, verify_s=0.4), {"tpot": "other"}),
        (Objective(tpot_ms=8), {}, DecodeTimes(0.2, 0.5, prefill_s=0.3), {"tpot": "prefill"}),
        (Objective(tpot_ms=8), {"preempted_ms": (0.0, 400.0)}, DecodeTimes(0.1, 0.4), {"tpot": "preempt"}),
        (Objective(e2e_ms=500), {"queue_ms": 40}, DecodeTimes(0.2, 0.75), {"e2e": "verify"}),
        (
            Objective(e2e_ms=1100),
            {"queue_ms": 900, "ttft_ms": 950, "e2e_ms": 1950},
            DecodeTimes(0.25, 0.6),
            {"e2e": "queue"},
        ),
        (Objective(ttft_ms=60, tpot_ms=11, e2e_ms=2000), {}, DecodeTimes(), {}),
        (Objective(), {"ttft_ms": 1e6}, DecodeTimes(), {}),
    ],
)
def test_the_largest_excess_is_to_blame(
    objective: Objective, changes: dict[str, Any], times: DecodeTimes, expected: dict[str, str]
) -> None:
    assert causes(objective, receipt(**changes), times, USUAL) == expected


milliseconds = st.floats(0, 1e5)


@given(
    st.floats(0.1, 1e4),
    st.dictionaries(st.sampled_from(CAUSES), milliseconds),
    st.dictionaries(st.sampled_from(CAUSES), st.floats(0, 1)),
)
def test_no_other_cause_exceeds_its_share_by_more(
    allowed: float, spent: dict[str, float], usual: dict[str, float]
) -> None:
    found = cause(allowed, spent, usual)
    for other in CAUSES:
        excess = spent.get(other, 0.0) - allowed * usual.get(other, 0.0)
        assert spent.get(found, 0.0) - allowed * usual.get(found, 0.0) >= excess


@given(
    st.tuples(*[st.one_of(st.none(), st.floats(0.5, 1e4))] * 3),
    milliseconds,
    milliseconds,
    milliseconds,
    st.tuples(*[st.floats(0, 100)] * 3),
    st.integers(2, 1000),
)
def test_each_missed_objective_has_one_cause(
    wanted: tuple[float | None, float | None, float | None],
    queue_ms: float,
    prefill_ms: float,
    decode_ms: float,
    seconds: tuple[float, float, float],
    num_tokens: int,
) -> None:
    objective = Objective(tpot_ms=wanted[0], ttft_ms=wanted[1], e2e_ms=wanted[2])
    got = receipt(
        queue_ms=queue_ms,
        ttft_ms=queue_ms + prefill_ms,
        tpot_ms=decode_ms / (num_tokens - 1),
        e2e_ms=queue_ms + prefill_ms + decode_ms,
    )
    found = causes(objective, got, DecodeTimes(*seconds), USUAL)
    late = {
        "ttft": wanted[1] is not None and queue_ms + prefill_ms > wanted[1],
        "tpot": wanted[0] is not None and decode_ms / (num_tokens - 1) > wanted[0],
        "e2e": wanted[2] is not None and queue_ms + prefill_ms + decode_ms > wanted[2],
    }
    assert {name for name, is_missed in missed(objective, got).items() if is_missed} == set(found)
    assert set(found) == {name for name, is_late in late.items() if is_late}
    assert set(found.values()) <= set(CAUSES)
