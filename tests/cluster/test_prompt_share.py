"""How many of the next steps have prompts: known from the last ones, and at once when a burst comes."""

from __future__ import annotations

import pytest

from cluster.prompt_share import MANY_PROMPTS, PromptShare
from cluster.requests import Request, Trigger
from cluster.stream_messages import Submit
from engine.sampling_params import SamplingParams
from verifier.messages import PrefillProgress, Verdict, VerifyResult

VERDICT = Verdict(request_id="a", nodes=[], tokens=[1])
PROGRESS = PrefillProgress(request_id="b", num_computed=8)


def result(*, decodes: bool, prefills: bool) -> VerifyResult:
    return VerifyResult(
        call_id=0,
        verdicts=[VERDICT] if decodes else [],
        prefills=[PROGRESS] if prefills else [],
        free_slots=1,
        forward_seconds=0.01,
    )


def admitted(number: int) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=4, seed=0)
    request = Request(Submit(request_id=str(number), prompt=[1, 2], sampling=sampling), "", 0.0, number)
    request.advance(Trigger.ADMITTED)
    return request


def test_it_follows_the_steps_that_decode() -> None:
    share = PromptShare()
    for step in range(400):
        share.observe(result(decodes=True, prefills=step % 4 == 0))
        share.observe(result(decodes=False, prefills=True))  # nothing is decoded: this one does not count
    share.look([])
    assert share.ahead == pytest.approx(0.25, abs=0.1)


def test_prompts_that_were_admitted_are_seen_before_their_steps() -> None:
    share = PromptShare()
    burst = [admitted(number) for number in range(MANY_PROMPTS)]
    share.look(burst[:2])
    assert share.ahead == pytest.approx(2 / MANY_PROMPTS)
    share.look(burst)
    assert share.ahead == 1.0
    for request in burst:
        request.advance(Trigger.CHUNK_SENT)
    share.look(burst)
    assert share.ahead == 1.0
    for request in burst:
        request.advance(Trigger.PREFILLED)
    share.look(burst)
    assert share.ahead == 0.0
