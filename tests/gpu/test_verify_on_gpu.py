"""Decisions on a GPU: those of a CPU, and one wait a verify call, whatever is asked of the next token."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention_kinds import AttentionKind
from engine.loading import load_runner
from engine.sampling import Row, TokenHistory, decide
from engine.sampling_params import SamplingParams
from engine.tree import TokenTree
from tests.emulated_cuda import IS_NEEDED, Emulation
from tests.gpu.waiting import arriving_once
from tests.verifier.target import spec_of
from verifier.messages import PrefillItem, VerifyCall, VerifyItem
from verifier.verifier import Verifier

VOCAB = 300
CALLS = 2 if IS_NEEDED else 4  # the first is captured
only_on_gpus = pytest.mark.skipif(IS_NEEDED, reason="emulated, Triton's attention does")
ASKED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logit_bias={3: 1.0, 7: -2.0}, repetition_penalty=1.3),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=1.2, top_p=0.9, seed=2),
    SamplingParams(top_k=20, seed=3, frequency_penalty=0.3, presence_penalty=-0.2),
    SamplingParams(min_p=0.05, seed=2**64 - 1, min_tokens=50, stop_token_ids=(1, 2)),
    SamplingParams(temperature=0.9, top_p=0.95, top_k=50, min_p=0.01, seed=4, bad_words=((9,), (4, 8))),
    SamplingParams(temperature=0.5, seed=5, allowed_token_ids=(1, 5, 9, 200)),
]


@pytest.mark.parametrize("masked", [False, True])
def test_decisions_are_those_of_a_cpu(
    masked: bool, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    asked = ASKED * 3
    logits = torch.from_numpy(rng.normal(scale=3, size=(len(asked), VOCAB)).astype(np.float32))
    rows = [
        Row(
            params,
            position=i,
            history=TokenHistory([3, 14, 15], [9, 4]),
            path=(9,) * (i % 3),
            allowed=np.full(10, 0x55555555, dtype=np.int32) if masked and i % 2 else None,
        )
        for i, params in enumerate(asked)
    ]
    tokens, gaps = decide(logits, rows).fetch()
    there = logits.to(cuda)
    found_tokens, found_gaps = arriving_once(monkeypatch, lambda: decide(there, rows).fetch())
    assert found_tokens == tokens
    np.testing.assert_allclose(found_gaps, gaps, atol=1e-4)
    assert torch.equal(there.cpu(), logits)  # what is asked for log-probabilities of them


@pytest.mark.parametrize(
    ("asked", "most"), [([ASKED[0]], 6), ([ASKED[3]], 8), (ASKED[2:4], 8), (ASKED[:5], 21)]
)
def test_launches_of_a_decision_do_not_grow_with_its_rows(
    asked: list[SamplingParams], most: int, cuda: torch.device, emulated: Emulation
) -> None:
    """Greedy, sampled, both, and with penalties and biased tokens."""
    found = []
    for repeats in (1, 5):
        rows = [Row(params, i, TokenHistory([3], [9])) for i, params in enumerate(asked * repeats)]
        logits = torch.zeros(len(rows), VOCAB, device=cuda)
        before = len(emulated.launches)
        decide(logits, rows).fetch()
        found.append(len(emulated.launches) - before)
    assert found[0] == found[1] <= most


@pytest.mark.parametrize("attention", [pytest.param("padded", marks=only_on_gpus), "triton"])
def test_a_verify_call_waits_once(
    attention: AttentionKind, target: Path, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of several calls with trees of the same shapes; those before capture them."""
    runner = load_runner(
        target, dtype="float32", num_slots=2048, attention=attention, device="cuda", self_test=False
    )
    verifier = Verifier(runner, device=cuda)
    rng = np.random.default_rng(1)
    names = [f"r{i}" for i in range(len(ASKED))]
    specs = [spec_of(name, [3, 14, 15, 9], params) for name, params in zip(names, ASKED, strict=True)]
    done = verifier.step(
        VerifyCall(
            call_id=0,
            prefill=[PrefillItem(request_id=spec.request_id, num_tokens=10, spec=spec) for spec in specs],
        )
    )
    roots = {one.request_id: one.verdict.tokens[-1] for one in done.prefills if one.verdict is not None}
    assert sorted(roots) == names
    for number in range(CALLS):
        call = VerifyCall(
            call_id=number + 1,
            verify=[
                VerifyItem(
                    request_id=name,
                    tree=TokenTree.chain(roots[name], rng.integers(0, 90, 3).tolist(), [-0.5] * 3),
                )
                for name in names
            ],
        )
        if number == CALLS - 1:
            result = arriving_once(monkeypatch, partial(verifier.step, call))
        else:
            result = verifier.step(call)
        assert [verdict.request_id for verdict in result.verdicts] == names
        assert 0 < result.forward_seconds <= result.seconds
        roots = {verdict.request_id: verdict.tokens[-1] for verdict in result.verdicts}
