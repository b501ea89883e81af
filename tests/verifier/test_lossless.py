"""The theorem: what a request returns depends on its specification alone (design, idea 2)."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, assume, event, given
from hypothesis import strategies as st

from engine.sampling_params import SamplingParams
from engine.tree import TokenTree
from tests.examples import examples
from tests.verifier.target import MAX_TOKENS, NEAR_TIE, VOCAB, Client, Target, drive, spec_of
from verifier.messages import PrefillItem, VerifyCall, VerifyItem
from verifier.verifier import Verifier

TARGET = Target()

tokens = st.integers(0, VOCAB - 1)
off_or = lambda off, *on: st.sampled_from([off, off, *on])  # noqa: E731
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.3, 0.8, 1.0, 2.0]),
    top_k=off_or(0, 1, 5),
    top_p=off_or(1.0, 0.9, 0.5, 0.0),
    min_p=off_or(0.0, 0.02, 0.3),
    presence_penalty=off_or(0.0, 1.5, -1.0),
    frequency_penalty=off_or(0.0, 0.7, -0.3),
    repetition_penalty=off_or(1.0, 1.3, 0.8),
    logit_bias=off_or({}, {7: 3.0, 9: -100.0}, {VOCAB + 4: 1.0}),
    allowed_token_ids=off_or((), tuple(range(2, 30)), (11, 12, VOCAB + 4)),
    bad_words=off_or((), ((5,), (12, 7), (11, 12, 11)), ((20, 21), (4, 4))),
    seed=st.integers(-1, 2**64 - 1),
    logprobs=st.sampled_from([None, 0, 3]),
    max_tokens=st.integers(1, 14),
    min_tokens=off_or(0, 4),
    stop_token_ids=off_or((), (1,), (2, 3, 4, 5, 6, 7, 8, 9)),
)
prompts = st.one_of(
    st.lists(tokens, min_size=1, max_size=40),
    # Prompts that share a long prefix.
    st.builds(lambda tail: [*range(1, 33), *tail], st.lists(tokens, max_size=6)),
)


@examples(100, suppress_health_check=list(HealthCheck))
@given(
    requests=st.lists(st.tuples(prompts, params), min_size=1, max_size=5),
    num_slots=st.sampled_from([90, 150, 600]),
    runner=st.sampled_from(["hf", "lean", "captured"]),
    prefix_sharing=st.booleans(),
    preempt=st.sampled_from([0.0, 0.15]),
    seed=st.integers(0, 2**32),
)
def test_any_schedule_equals_plain_decoding(
    requests: list[tuple[list[int], SamplingParams]],
    num_slots: int,
    runner: str,
    prefix_sharing: bool,
    preempt: float,
    seed: int,
) -> None:
    model = TARGET.runner(num_slots, lean=runner == "lean", captured=runner == "captured")
    verifier = Verifier(model, prefix_sharing=prefix_sharing)
    clients, ties = [], 0
    for i, (prompt, sampling) in enumerate(requests):
        spec = spec_of(f"r{i}", prompt, sampling)
        expected, gaps = TARGET.decode(spec)
        ties += min(gaps) < NEAR_TIE
        clients.append(Client(spec, expected))
    event(f"near ties: {ties}")
    assume(ties == 0)

    drive(verifier, clients, random.Random(seed), preempt)

    for client in clients:
        assert client.output == client.expected
        if client.spec.sampling.logprobs is not None:
            check_logprobs(client)
        assert client.spec.sampling.logprobs is not None or not client.logprobs
    verifier.step(VerifyCall(call_id=0, release=[c.spec.request_id for c in clients]))
    assert verifier.free_slots == num_slots
    verifier._table._cache.check_invariants()


def check_logprobs(client: Client) -> None:
    """Against the log-softmax of a plain forward over each prefix."""
    sequence = list(client.spec.tokens)
    assert len(client.logprobs) == len(client.output)
    for token, found in zip(client.output, client.logprobs, strict=True):
        expected = TARGET.logits(sequence).log_softmax(-1)[0]
        assert found.logprob == pytest.approx(float(expected[token]), abs=1e-4)
        assert len(found.top_ids) == client.spec.sampling.logprobs
        best = expected.topk(len(found.top_ids)).values.tolist()
        assert found.top_logprobs == pytest.approx(best, abs=1e-4)
        assert [float(expected[i]) for i in found.top_ids] == pytest.approx(best, abs=1e-4)
        sequence.append(token)


def test_up_to_the_longest_sequence() -> None:
    prompt = list(range(1, 41))
    # The last row the model can run decides one token more.
    room = MAX_TOKENS + 1 - len(prompt)
    expected, _ = TARGET.decode(spec_of("r", prompt, SamplingParams(temperature=0.0, max_tokens=room)))
    verifier = Verifier(TARGET.runner())
    spec = spec_of("r", prompt, SamplingParams(temperature=0.0, max_tokens=1000))
    first = verifier.step(
        VerifyCall(call_id=0, prefill=[PrefillItem(request_id="r", num_tokens=99, spec=spec)])
    )
    assert first.prefills[0].verdict is not None
    output = first.prefills[0].verdict.tokens
    while True:
        future = expected[len(output) :] + [0] * 8
        tree = TokenTree.chain(output[-1], future[:8], [-0.1] * 8)
        verdict = verifier.step(
            VerifyCall(call_id=1, verify=[VerifyItem(request_id="r", tree=tree)])
        ).verdicts[0]
        if not verdict.tokens:
            break
        output += verdict.tokens
    assert output == expected
