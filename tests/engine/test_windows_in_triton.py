"""Windows, sinks and capped scores in Triton's attention, run by its interpreter on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import attention_tiles
from engine.hf_runner import HFRunner
from engine.loading import load_runner
from engine.runner import Segment
from engine.scored_attention import ScoredAttention
from engine.scoring import Scoring
from engine.triton_attention import TritonAttention
from engine.unsupported_model import UnsupportedModel
from engine.windows import LEAST_WINDOW, within
from tests.engine import tiny_models
from tests.engine.test_windows import segments
from tests.examples import examples

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these kernels on the GPU")
DIM = 16


@examples(40)
@given(
    drawn=segments(),
    heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    window=st.none() | st.integers(LEAST_WINDOW, 130),
    softcap=st.none() | st.sampled_from([0.5, 3.0]),
    has_sinks=st.booleans(),
    programs=st.sampled_from([1, 8, 200]),
    seed=st.integers(0, 1000),
)
def test_scores_are_those_computed_step_by_step(
    drawn: tuple[Segment, list[int], list[set[int]]],
    heads: tuple[int, int],
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    programs: int,
    seed: int,
) -> None:
    """A chunk or a tree, beside a decoded row of another request, with keys split and not."""
    num_heads, kv_heads = heads
    torch.manual_seed(seed)
    own, num_slots = drawn[0], 600
    numbers = np.arange(300, 600, dtype=np.int32)
    batch = [
        own,
        Segment(numbers[:1], np.array([seed % 200], np.int32), numbers[:1], numbers[1 : 1 + seed % 200]),
    ]
    scoring = Scoring(window, softcap, torch.randn(num_heads) if has_sinks else None)
    kernels, plain = (
        made(num_slots, dtype=torch.float32, device="cpu") for made in (TritonAttention, ScoredAttention)
    )
    for attention in (kernels, plain):
        attention.allocate(0, kv_heads, DIM, DIM)
        attention.set_scoring(0, scoring)
    plain.storage(0).copy_(kernels.storage(0).normal_())
    positions = torch.from_numpy(np.concatenate([segment.positions for segment in batch]))
    q = torch.randn(len(positions), num_heads, DIM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_tiles, "ENOUGH_PROGRAMS", programs)
        got = kernels.attend(replace(kernels.plan(batch), positions=positions), 0, q, 0.3)
    cut = batch if window is None else [within(segment, window) for segment in batch]
    torch.testing.assert_close(got, plain.attend(plain.plan(cut), 0, q, 0.3), atol=1e-5, rtol=1e-4)


def test_layers_with_windows_can_be_prepared() -> None:
    attention = TritonAttention(16, dtype=torch.float32, device="cpu")
    attention.allocate(0, 2, DIM, DIM)
    attention.set_scoring(0, Scoring(LEAST_WINDOW, 30.0, torch.zeros(4)))
    attention.prepare(0, 4)


@pytest.mark.parametrize(
    "name",
    [
        "gpt_oss_window",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("mistral_window", "gemma2_window")),
    ],
)
def test_a_model_is_checked_behind_its_window(name: str, tmp_path: Path) -> None:
    runner = load_runner(tiny_models.write(name, tmp_path), num_slots=512, attention="triton")
    assert isinstance(runner, HFRunner)
    assert isinstance(runner.attention, TritonAttention)
    assert runner.shape.windows == (64,)
    assert runner.takes_trees


def test_the_check_notices_a_window_that_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = TritonAttention.set_scoring
    monkeypatch.setattr(
        TritonAttention,
        "set_scoring",
        lambda self, layer, scoring: plain(self, layer, scoring._replace(window=None)),
    )
    with pytest.raises(UnsupportedModel, match="self-test failed at a prompt longer than its window of 64"):
        load_runner(tiny_models.write("mistral_window", tmp_path), num_slots=512, attention="triton")
