"""Draft calls answered whatever a drafter does, and what is forgotten."""

from __future__ import annotations

import numpy as np

from cluster.draft_service import DraftService
from drafters.heads_drafter import HeadsDrafter
from drafters.messages import DraftCall, DraftItem, DraftPlan, DraftResult
from engine.sampling_params import RequestSpec, SamplingParams
from engine.wire import Decoder, encode

RESULTS: Decoder[DraftResult] = Decoder(DraftResult)


def call(call_id: int) -> DraftCall:
    spec = RequestSpec(
        request_id="r", tokens=[1, 2], prompt_len=2, sampling=SamplingParams(temperature=0.0, max_tokens=9)
    )
    item = DraftItem(request_id="r", start=0, tokens=np.zeros(0, np.int32), plan=DraftPlan(2), spec=spec)
    return DraftCall(call_id=call_id, items=[item])


def drafter() -> HeadsDrafter:
    return HeadsDrafter(num_heads=3, vocab_size=50, max_tokens=64)


def test_a_drafter_that_fails_leaves_requests_without_drafts() -> None:
    class Broken(HeadsDrafter):
        def draft(self, call: DraftCall) -> DraftResult:
            raise IndexError("a bug")

    service = DraftService(Broken(num_heads=3, vocab_size=50, max_tokens=64))
    for answer in (service.draft(call(7)), RESULTS.decode(service.answer(encode(call(7))))):
        assert (answer.call_id, answer.unknown, answer.drafts) == (7, ["r"], [])


def test_all_requests_are_forgotten_at_once() -> None:
    service = DraftService(drafter())
    service.answer(encode(call(1)))
    more = DraftItem(request_id="r", start=2, tokens=np.array([3], np.int32), plan=DraftPlan(2))
    known = RESULTS.decode(service.answer(encode(DraftCall(call_id=2, items=[more]))))
    assert known.unknown == []
    service.forget_all()
    more = DraftItem(request_id="r", start=3, tokens=np.array([4], np.int32), plan=DraftPlan(2))
    assert RESULTS.decode(service.answer(encode(DraftCall(call_id=3, items=[more])))).unknown == ["r"]
