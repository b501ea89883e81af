"""Log-probabilities of a prompt, in any chunks and beside any cached prefix, against the plain model's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling_params import RequestSpec, SamplingParams
from tests.examples import examples
from tests.verifier.target import VOCAB, Target, spec_of
from verifier.messages import PrefillItem, TokenLogprobs, Verdict, VerifyCall
from verifier.verifier import Verifier

TARGET = Target()
PLAIN = SamplingParams(temperature=0.0, max_tokens=4)


def prefill(
    verifier: Verifier, spec: RequestSpec, chunks: Sequence[int]
) -> tuple[list[TokenLogprobs], Verdict | None, int]:
    """What all chunks said of the prompt, the first decided token, and how much was cached."""
    found: list[TokenLogprobs] = []
    cached = 0
    opening: RequestSpec | None = spec
    for chunk in [*chunks, 100]:
        item = PrefillItem(request_id=spec.request_id, num_tokens=chunk, spec=opening)
        (progress,) = verifier.step(VerifyCall(call_id=1, prefill=[item])).prefills
        opening = None
        found += progress.prompt_logprobs
        cached += progress.num_cached
        if progress.verdict is not None:
            return found, progress.verdict, cached
    raise AssertionError("the prompt was not prefilled")


@examples(40)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
    chunks=st.lists(st.integers(1, 12), max_size=4),
    num_top=st.integers(0, 3),
    lean=st.booleans(),
)
def test_prompt_logprobs_are_the_models(
    prompt: list[int], chunks: list[int], num_top: int, lean: bool
) -> None:
    verifier = Verifier(TARGET.runner(lean=lean))
    _, verdict, _ = prefill(verifier, spec_of("before", prompt, PLAIN), [])
    verifier.step(VerifyCall(call_id=2, release=["before"]))
    asking = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=num_top)
    found, same, cached = prefill(verifier, spec_of("r", prompt, asking), chunks)
    assert verdict is not None
    assert same is not None
    assert same.tokens == verdict.tokens
    assert cached == 0
    assert len(found) == len(prompt) - 1
    for at, entry in enumerate(found, start=1):
        expected = TARGET.logits(prompt[:at])[0].log_softmax(-1)
        assert entry.logprob == pytest.approx(float(expected[prompt[at]]), abs=1e-3)
        assert entry.top_logprobs == pytest.approx(sorted(expected.tolist())[::-1][:num_top], abs=1e-3)
        assert len(entry.top_ids) == num_top


def test_a_request_with_output_has_its_prompt_told_already() -> None:
    prompt = [3, 14, 15, 9, 26, 5]
    asking = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1)
    first = TARGET.decode(spec_of("r", prompt, asking))[0][0]
    spec = RequestSpec(request_id="r", tokens=[*prompt, first], prompt_len=len(prompt), sampling=asking)
    found, verdict, _ = prefill(Verifier(TARGET.runner()), spec, [])
    assert found == []
    assert verdict is not None
