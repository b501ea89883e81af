"""How long prompts wait for their first chunk once the target should be free."""

from __future__ import annotations

import pytest

from cluster.call_parts import NO_ROWS, CallParts
from cluster.first_chunks import MOST_TIMES, FirstChunks
from cluster.outstanding_verify import OutstandingVerify
from cluster.requests import Request, State
from engine.tree import TokenTree
from tests.cluster.test_overload_admission import answer, submitted

FORWARD_S = 0.01


def call(sent_at: float, *, decodes: bool = True) -> OutstandingVerify:
    return OutstandingVerify(
        call_id=0,
        drafted=False,
        decoding=NO_ROWS,
        parts=CallParts("verifier", FORWARD_S, 0.0, FORWARD_S, FORWARD_S, 1.0),
        trees={"other": TokenTree.root_only(1)} if decodes else {},
        prefilling={},
        ending=[],
        members={},
        num_tokens=1,
        decides_one=True,
        sent_at=sent_at,
    )


def waited_s(after_s: float, *, arrived: float = 0.0, num_computed: int = 0, decodes: bool = True) -> float:
    """What is believed after prompts that were begun so long after the call before was due."""
    chunks = FirstChunks()
    for number in range(200):
        due_at = number + FORWARD_S
        request = Request(submitted(number), "client", number + arrived, number)
        request.state, request.first_chunk_at = State.PREFILL_SENT, due_at + after_s
        request.num_computed = num_computed
        chunks.verified(answer(), call(float(number)), [])
        chunks.verified(answer(computed=[request]), call(due_at + after_s, decodes=decodes), [request])
    assert chunks.wait_s(0) == 0.0
    return chunks.wait_s(1)


def test_it_is_counted_from_when_the_call_before_was_due() -> None:
    assert waited_s(0.006) == pytest.approx(0.006)
    # Or from its arrival, and never less than nothing: sent ahead, they wait for nobody.
    assert waited_s(0.006, arrived=FORWARD_S + 0.004) == pytest.approx(0.002)
    assert waited_s(-0.002) == 0.0


def test_a_hiccup_is_not_believed() -> None:
    assert waited_s(5.0) == pytest.approx(MOST_TIMES * FORWARD_S)


def test_later_chunks_and_prompts_by_themselves_say_nothing() -> None:
    assert waited_s(0.006, num_computed=1) == 0.0
    assert waited_s(0.006, decodes=False) == 0.0
