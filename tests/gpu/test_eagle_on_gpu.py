"""EAGLE's drafts on a GPU: those of a CPU, beside captured forwards too, with one wait a call."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from engine.eagle_loading import EagleFiles
from engine.loading import load_runner
from engine.sampling_params import SamplingParams
from engine.stop_rules import EstimateRule
from engine.tree import TokenTree
from tests.eagle_reference import EagleReference
from tests.gpu.waiting import waiting_once
from tests.verifier.target import spec_of
from verifier import eagle_drafts
from verifier.eagle_drafts import EagleDrafts
from verifier.messages import PrefillItem, Verdict, VerifyCall, VerifyItem
from verifier.proposing import Asking
from verifier.request_state import RequestState
from verifier.verifier import Verifier

DEPTH, WIDTH = 3, 2
SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=99),
    SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_tokens=99),
]


def serving(files: EagleFiles, target: Path, device: str) -> Verifier:
    runner = load_runner(
        target,
        num_slots=512,
        attention="triton" if device == "cuda" else "padded",
        device=device,
        self_test=False,
        feature_layers=files.layers,
        beside=files.beside("float32", 64),
    )
    layer, reading = files.load(runner, 64)
    drafts = EagleDrafts(layer, reading, runner.shape.max_tokens)
    return Verifier(runner, proposer=drafts, device=torch.device(device))


def steps(verifier: Verifier) -> list[list[Verdict]]:
    """A prefill of two requests, and verify calls of one shape, which are captured on the way."""
    specs = [spec_of(f"r{i}", [3, 14, 15, 9, 2, 6][i:], params) for i, params in enumerate(SAMPLINGS)]
    asked = {"num_candidates": WIDTH, "num_heads": DEPTH, "stop_token_logp": -4.0}
    prefill = [PrefillItem(request_id=one.request_id, num_tokens=10, spec=one, **asked) for one in specs]
    done = [one.verdict for one in verifier.step(VerifyCall(call_id=0, prefill=prefill)).prefills]
    found = [[verdict for verdict in done if verdict is not None]]
    for number in range(1, 4):
        items = [
            VerifyItem(
                request_id=verdict.request_id,
                tree=TokenTree.chain(verdict.tokens[-1], [5 * number, 7], [-0.5, -1.0]),
                **asked,
            )
            for verdict in found[-1]
        ]
        found.append(verifier.step(VerifyCall(call_id=number, verify=items)).verdicts)
    return found


def test_drafts_are_those_of_a_cpu_and_wait_once(
    target: Path, tmp_path: Path, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = EagleReference(LlamaForCausalLM.from_pretrained(target).eval(), draft_tokens=range(2, 90))
    files = EagleFiles.of(reference.write(tmp_path / "eagle"), target)
    there, here = serving(files, target, "cuda"), serving(files, target, "cpu")
    for mine, theirs in zip(steps(there), steps(here), strict=True):
        assert len(mine) == len(theirs) == 2
        for one, other in zip(mine, theirs, strict=True):
            assert one.tokens == other.tokens
            assert one.proposals is not None
            assert other.proposals is not None
            np.testing.assert_allclose(one.proposals.logp, other.proposals.logp, atol=1e-3)
            np.testing.assert_array_equal(one.proposals.token, other.proposals.token)
            np.testing.assert_array_equal(one.proposals.parent, other.proposals.parent)
    drafts = there._proposer
    assert isinstance(drafts, EagleDrafts)
    states = [there._table._requests[f"r{i}"] for i in range(2)]
    asking = [Asking(state, [7], 0, WIDTH, DEPTH, place) for place, state in enumerate(states)]
    drafts.propose(asking)
    found = waiting_once(monkeypatch, eagle_drafts, partial(drafts.propose, asking))
    assert [one.token.shape for one in found] == [(DEPTH, WIDTH)] * 2
    # What ends drafts is asked a layer late, and waits for events only.
    certain = [dataclasses.replace(one, least_logp=0.0) for one in asking]
    found = waiting_once(monkeypatch, eagle_drafts, partial(drafts.propose, certain))
    assert [one.token.shape for one in found] == [(2, WIDTH)] * 2
    dear = EstimateRule(
        num_requests=2, base_s=1.0, first_layer_s=0.1, layer_s=50.0, token_s=0.0, mean_confidence=0.5
    )
    found = waiting_once(monkeypatch, eagle_drafts, partial(drafts.propose, asking, dear))
    assert [one.token.shape for one in found] == [(2, WIDTH)] * 2
    stops = found[0].token[0].tolist()  # nothing goes on
    spec = spec_of("s", [3], SamplingParams(temperature=0.0, max_tokens=99, stop_token_ids=tuple(stops)))
    states[0] = RequestState(spec, there._runner.shape)
    asking = [Asking(states[0], [7], 0, WIDTH, DEPTH, 0, least_logp=-50.0)]
    found = waiting_once(monkeypatch, eagle_drafts, partial(drafts.propose, asking))
    assert [one.token.shape for one in found] == [(2, WIDTH)]
