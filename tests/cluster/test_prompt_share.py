"""How far prompts fill the steps: known from the last ones, and at once when a burst comes."""

from __future__ import annotations

import pytest

from cluster.batching.registry import BATCHING_RULES, reads_beside
from cluster.prompt_share import MANY_STEPS, PromptShare
from cluster.requests import Request, Trigger
from cluster.stream_messages import Submit
from engine.sampling_params import SamplingParams

CHUNK = 16


def admitted(number: int, num_prompt: int) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=4, seed=0)
    submit = Submit(request_id=str(number), prompt=[1] * num_prompt, sampling=sampling)
    request = Request(submit, "", 0.0, number)
    request.advance(Trigger.ADMITTED)
    return request


@pytest.mark.parametrize(("num_prompt", "share"), [(CHUNK // 2, 0.125), (CHUNK, 0.25), (2 * CHUNK, 0.25)])
def test_it_is_the_room_taken_rather_than_the_steps_with_prompts(num_prompt: int, share: float) -> None:
    """Every fourth step finds a prompt; no step takes more than it has room for."""
    prompts = PromptShare(CHUNK)
    for step in range(400):
        prompts.look([admitted(step, num_prompt)] if step % 4 == 0 else [])
    assert prompts.ahead == pytest.approx(share, abs=0.1 * share + 0.05)


def test_prompts_that_were_admitted_are_seen_before_their_steps() -> None:
    prompts = PromptShare(CHUNK)
    prompts.look([])
    burst = [admitted(number, 2 * CHUNK) for number in range(MANY_STEPS // 2)]
    prompts.look(burst)
    assert prompts.ahead == 1.0
    for request in burst:
        request.advance(Trigger.CHUNK_SENT)
    prompts.look(burst)
    assert prompts.ahead == 1.0
    for request in burst:
        request.advance(Trigger.PREFILLED)
    for _ in range(100):
        prompts.look(burst)
    assert prompts.ahead < 0.01


def test_the_next_step_reads_what_it_has_room_for() -> None:
    prompts = PromptShare(CHUNK)
    for requests, rows in (
        ([], 0),
        ([admitted(0, 5)], 5),
        ([admitted(0, 5), admitted(1, 40)], CHUNK),
        ([], 0),
    ):
        prompts.look(requests)
        assert prompts.rows == rows


def test_rules_that_read_prompts_apart_have_none_beside_decoding() -> None:
    apart = {name for name in BATCHING_RULES if not reads_beside(name)}
    assert apart == {"fcfs", "fcfs-slo", "sep-pipe", "stta"}
    prompts = PromptShare(CHUNK, reads_beside=False)
    prompts.look([admitted(0, 5)])
    assert prompts.rows == 0
