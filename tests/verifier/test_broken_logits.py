"""A model that gives NaN for some token: who asks for it is told, and nobody else hears of it."""

from __future__ import annotations

import copy
import logging
import math

import numpy as np
import pytest
import torch

from engine.hf_runner import HFRunner
from engine.llama_runner import LlamaRunner
from engine.llama_weights import load_llama_weights
from engine.runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.tree import TokenTree
from tests.verifier.target import Client, Target, make_model, spec_of
from verifier.messages import PrefillItem, Verdict, VerifyCall, VerifyItem
from verifier.verifier import Verifier

TARGET = Target()
BROKEN = 17
GOOD = [5, 9, 30, 2, 41]


def runner(kind: str, value: float) -> ModelRunner:
    """Of the target, with numbers that are none where `BROKEN` is looked up."""
    model = copy.deepcopy(make_model())
    with torch.no_grad():
        model.model.embed_tokens.weight[BROKEN] = value
    return LlamaRunner(load_llama_weights(model), 200) if kind == "lean" else HFRunner(model, 200)


def open_all(verifier: Verifier, prompts: dict[str, list[int]], params: SamplingParams) -> dict[str, Verdict]:
    items = [
        PrefillItem(request_id=name, num_tokens=99, spec=spec_of(name, prompt, params))
        for name, prompt in prompts.items()
    ]
    verdicts = [one.verdict for one in verifier.step(VerifyCall(call_id=0, prefill=items)).prefills]
    return {verdict.request_id: verdict for verdict in verdicts if verdict is not None}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["lean", "hf"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_token_is_made_up(
    value: float, kind: str, temperature: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Of NaN the lowest token was taken, step after step, and its log-probability was NaN."""
    params = SamplingParams(temperature=temperature, max_tokens=12, logprobs=1, seed=4)
    prompts = {"good": GOOD, "broken": [*GOOD[:3], BROKEN, 8], "at the end": [BROKEN]}
    verifier = Verifier(runner(kind, value))
    with caplog.at_level(logging.ERROR):
        verdicts = open_all(verifier, prompts, params)
    client = Client(spec_of("good", GOOD, params), TARGET.decode(spec_of("good", GOOD, params))[0])
    client.take(verdicts["good"])
    for name in ("broken", "at the end"):
        assert verdicts[name].is_broken
        assert not verdicts[name].tokens
        assert (
            f"request {name}: the model's logits are NaN or infinite after {len(prompts[name])} tokens"
            in (caplog.text)
        )
    while not client.done:
        call = VerifyCall(call_id=1, verify=[VerifyItem(request_id="good", tree=None)])
        client.take(verifier.step(call).verdicts[0])
    assert client.output == client.expected
    verifier.step(VerifyCall(call_id=2, release=list(prompts)))
    assert verifier.free_slots == 200


def test_an_answer_that_comes_to_such_a_token_ends_there() -> None:
    """Wherever it is in a tree: what follows it is not committed, and nothing of the tree is."""
    params = SamplingParams(temperature=0.0, max_tokens=12, logit_bias={BROKEN: 100.0})
    verifier = Verifier(runner("lean", math.nan))
    verdicts = open_all(verifier, {"plain": GOOD, "drafted": GOOD}, params)
    assert [verdict.tokens for verdict in verdicts.values()] == [[BROKEN], [BROKEN]]
    tree = TokenTree(
        token=np.array([BROKEN, 0, 3], np.int32),
        parent=np.array([-1, 0, 0], np.int32),
        logp=np.zeros(3, np.float32),
        depth=np.array([0, 1, 1], np.int32),
    )
    items = [VerifyItem(request_id="plain", tree=None), VerifyItem(request_id="drafted", tree=tree)]
    result = verifier.step(VerifyCall(call_id=1, verify=items))
    assert [(one.tokens, one.is_broken) for one in result.verdicts] == [([], True), ([], True)]
    verifier.step(VerifyCall(call_id=2, release=["plain", "drafted"]))
    assert verifier.free_slots == 200
    verifier._table._cache.check_invariants()
