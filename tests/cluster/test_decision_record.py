"""Lines of a record: what is written is read back as it was, and what is no record says so."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cost_model import CostProfile
from cluster.decisions import (
    FORMAT_VERSION,
    CalibrationTable,
    CallContext,
    DecisionsError,
    DraftCallRecord,
    Entry,
    ForwardSeconds,
    Header,
    PolicyCall,
    RequestDecision,
    Seconds,
    StepRecord,
    StopRuleCall,
    decode_entry,
    encode_entry,
    read_entries,
)
from cluster.linear_cost import LinearCost
from cluster.policies.base import DecodeRequest
from cluster.recorded_context import restored_context
from drafters.messages import DraftPlan
from engine.stop_rules import EstimateRule, ForwardRule
from engine.tree import TokenTree
from tests.examples import examples

NAMES = st.text(max_size=6)
COUNTS = st.integers(0, 10**6)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
LOGP = st.one_of(st.floats(max_value=0.0, allow_nan=False), st.just(-math.inf))


def header(**changes: Any) -> Header:
    fields: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "scheduler": "one",
        "flotilla": "0.1",
        "recorded_at": "2026-01-01T00:00:00+00:00",
        "policy": {"name": "fixed"},
        "profile": CostProfile(target=LinearCost(gamma=1e-3), drafters={"small": LinearCost(delta=1e-3)}),
    }
    return Header(**(fields | changes))


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    n = draw(st.integers(1, 8))
    parent = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, n)]
    logp = draw(st.lists(st.floats(max_value=0.0, width=32, allow_nan=False), min_size=n, max_size=n))
    depth = [0]
    for above in parent[1:]:
        depth.append(depth[above] + 1)
    return TokenTree.of(draw(st.lists(COUNTS, min_size=n, max_size=n)), parent, logp, depth)


VIEWS = st.builds(
    DecodeRequest,
    request_id=NAMES,
    drafter=NAMES,
    num_decoded=COUNTS,
    decoding_s=FINITE,
    tpot_s=st.none() | FINITE,
    max_draft=COUNTS,
    max_width=COUNTS,
    num_context=COUNTS,
    rate=FINITE,
)
PLANS = st.builds(DraftPlan, depth=COUNTS, width=COUNTS, stop_logp=LOGP)
SECONDS = st.builds(Seconds, predicted=FINITE, actual=st.none() | FINITE)
FORWARD_SECONDS = st.builds(
    ForwardSeconds, predicted=FINITE, actual=st.none() | FINITE, profile=st.none() | FINITE
)
CONTEXTS = st.builds(
    CallContext,
    values=st.dictionaries(NAMES, FINITE | COUNTS, max_size=3),
    corrections=st.dictionaries(NAMES, FINITE, max_size=3),
    calibration=st.dictionaries(NAMES, COUNTS, max_size=3),
)
PLACES = st.lists(st.integers(0, 5), max_size=4)
CALLS = st.builds(
    PolicyCall, order=COUNTS, requests=PLACES, context=CONTEXTS, budget=st.none() | st.integers(0, 99)
)
RULES = st.builds(
    EstimateRule,
    num_requests=COUNTS,
    base_s=FINITE,
    first_layer_s=FINITE,
    layer_s=FINITE,
    token_s=FINITE,
    mean_confidence=FINITE,
    tpot_s=st.none() | FINITE,
) | st.builds(ForwardRule, rate=FINITE, verify_tokens=FINITE, row_tokens=FINITE, forward_tokens=FINITE)
DECISIONS = st.builds(
    RequestDecision,
    request=VIEWS,
    required=FINITE,
    required_capped=st.none() | FINITE,
    plan=st.none() | PLANS,
    tree=st.none() | trees(),
    acceptance=st.none() | st.lists(FINITE, max_size=4),
    chosen=st.dictionaries(NAMES, PLACES, max_size=2),
    verified=st.none() | COUNTS,
    accepted=PLACES,
    committed=st.none() | COUNTS,
)
STEPS = st.builds(
    StepRecord,
    step=COUNTS,
    time_s=FINITE,
    requests=st.lists(DECISIONS, max_size=3),
    plans=st.lists(CALLS, max_size=2),
    stop_rules=st.lists(
        st.builds(
            StopRuleCall,
            order=COUNTS,
            requests=PLACES,
            context=CONTEXTS,
            drafter=NAMES,
            num_drafting=COUNTS,
            rule=RULES,
        ),
        max_size=1,
    ),
    select=st.none() | CALLS,
    context=st.none() | CONTEXTS,
    drafts=st.lists(
        st.builds(DraftCallRecord, drafter=NAMES, num_requests=COUNTS, seconds=SECONDS), max_size=2
    ),
    verify=st.none() | FORWARD_SECONDS,
    whole=st.none() | SECONDS,
    prompts=st.lists(FORWARD_SECONDS, max_size=2),
)
TABLES = st.builds(
    CalibrationTable,
    drafter=NAMES,
    version=COUNTS,
    state=st.fixed_dictionaries(
        {"tried": st.lists(FINITE | st.integers(0, 99).map(float), min_size=1, max_size=20).map(np.array)}
    ),
)


def plain(value: object) -> object:
    """Structs and arrays as what Python compares by itself; float32 as the doubles they are."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(one) for name, one in msgspec.structs.asdict(value).items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    return value


@examples(150)
@given(STEPS | TABLES)
def test_a_line_is_read_back_as_it_was_written(entry: Entry) -> None:
    line = encode_entry(entry)
    assert b"\n" not in line
    assert plain(decode_entry(line)) == plain(entry)
    # Any JSON reader must be able to read it: no `Infinity`, which only Python's knows.
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@examples(200)
@given(st.lists(st.floats(width=32, max_value=0.0, allow_nan=False), min_size=1, max_size=5))
def test_log_probabilities_keep_every_bit(logp: list[float]) -> None:
    tree = TokenTree.chain(1, [2] * len(logp), [0.0] * len(logp))
    tree = msgspec.structs.replace(tree, logp=np.array([0.0, *logp], dtype=np.float32))
    step = StepRecord(step=0, time_s=0.0, requests=[RequestDecision(request=VIEW, tree=tree)])
    read = decode_entry(encode_entry(step))
    assert isinstance(read, StepRecord)
    again = read.requests[0].tree
    assert again is not None
    assert again.logp.dtype == np.float32
    np.testing.assert_array_equal(again.logp, tree.logp)


VIEW = DecodeRequest(
    request_id="r",
    drafter="small",
    num_decoded=1,
    decoding_s=0.1,
    tpot_s=None,
    max_draft=4,
    max_width=2,
    num_context=9,
    rate=0.5,
)
STEP = encode_entry(StepRecord(step=0, time_s=0.0, requests=[]))
HEADER = encode_entry(header())


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty"),
        ([b"\n"], "is empty"),
        ([STEP + b"\n"], "line 1: a record of decisions begins with a header"),
        ([HEADER + b"\n", b"{}\n"], "line 2 is no entry"),
        ([HEADER + b"\n", b"not JSON\n", STEP], "line 2 is no entry"),
        ([HEADER + b"\n", b"\xff\xfe\n"], "line 2 is no entry"),
        ([HEADER + b"\n", STEP[:-7]], "line 2 is cut off"),
        ([HEADER + b"\n", STEP.replace(b'"step":0', b'"step":"x"') + b"\n"], r"line 2 is no entry.*\$\.step"),
        ([encode_entry(header(version=99)) + b"\n"], "line 1: format version 99, written by Flotilla 0.1"),
    ],
)
def test_what_is_no_record_names_the_line_and_why(lines: list[bytes], message: str) -> None:
    with pytest.raises(DecisionsError, match=message):
        list(read_entries(lines))


def test_an_empty_line_between_two_writers_is_no_error() -> None:
    lines = [HEADER + b"\n", b"\n", HEADER + b"\n", STEP + b"\n"]
    assert [type(entry) for entry in read_entries(lines)] == [Header, Header, StepRecord]


def test_a_context_whose_calibration_or_fields_are_missing_says_so() -> None:
    call = CallContext(values={}, corrections={}, calibration={"small": 3})
    with pytest.raises(DecisionsError, match="version 3 of the calibration of drafter `small` is missing"):
        restored_context(call, header().profile, {})
    with pytest.raises(DecisionsError, match=r"another version of Flotilla.*step_s"):
        restored_context(msgspec.structs.replace(call, calibration={}), header().profile, {})
