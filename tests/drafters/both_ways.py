"""Drafters whose trees grow on the device or on the host, and how the two are compared."""

from __future__ import annotations

from drafters.messages import DraftResult
from engine.cuda_graphs import GraphedRunner
from engine.llama_runner import LlamaRunner
from engine.llama_weights import load_llama_weights
from engine.sampling_params import SamplingParams
from tests.drafters.tiny import GREEDY, assert_same_tree, llama

WEIGHTS = load_llama_weights(llama())
SLOTS = 900
LONG = {"max_tokens": 9999}
SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=11, **LONG),
    SamplingParams(temperature=0.7, seed=-5, top_p=0.9, top_k=20, min_p=0.01, **LONG),
    SamplingParams(temperature=0.9, seed=3, top_p=0.5, logit_bias={3: 4.0, 5: -9.0}, **LONG),
    SamplingParams(temperature=0.0, allowed_token_ids=(2, 3, 5, 7, 11, 13), **LONG),
    SamplingParams(temperature=0.8, seed=2**63, min_tokens=8, stop_token_ids=tuple(range(0, 50, 3)), **LONG),
]
WITH_PENALTIES = [
    SamplingParams(temperature=1.3, seed=2, repetition_penalty=1.3, presence_penalty=0.5, **LONG),
    SamplingParams(temperature=0.0, bad_words=((3, 5), (7,)), **LONG),
]


def plain() -> LlamaRunner:
    return LlamaRunner(WEIGHTS, SLOTS)


def graphed() -> GraphedRunner:
    return GraphedRunner(LlamaRunner(WEIGHTS, SLOTS + 1), capture_at=1)


def assert_same(on_device: DraftResult, on_host: DraftResult) -> None:
    assert on_device.unknown == on_host.unknown
    for device, host in zip(on_device.drafts, on_host.drafts, strict=True):
        assert device.request_id == host.request_id
        assert_same_tree(device.tree, host.tree)
        assert (device.num_scored, device.num_agreed) == (host.num_scored, host.num_agreed)
