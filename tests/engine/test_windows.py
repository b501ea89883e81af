"""Sliding windows, capped scores and sinks: rows see the keys that Transformers' rule says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention import PaddedAttention
from engine.hf_attention import Seen, windows_of
from engine.hf_runner import HFRunner
from engine.loading import load_runner
from engine.rectangles import rectangle
from engine.runner import Segment
from engine.scored_attention import ScoredAttention
from engine.scoring import Scoring
from engine.unsupported_model import UnsupportedModel
from engine.windows import LEAST_WINDOW, check_trees, within
from tests.engine import tiny_models
from tests.examples import examples

WINDOWED = ["mistral_window", "gemma3_window", "gemma2_window", "gpt_oss_window"]


@st.composite
def segments(draw: st.DrawFn) -> tuple[Segment, list[int], list[set[int]]]:
    """A causal chunk or a tree behind committed tokens; the position of each key, and what rows see."""
    num_past, rows = draw(st.integers(0, 200)), draw(st.integers(1, 90))
    is_tree = draw(st.booleans())
    if is_tree:
        rows = min(rows, 30)
        parents = [-1, *(draw(st.integers(0, row - 1)) for row in range(1, rows))]
        visible = np.eye(rows, dtype=np.bool_)
        for row in range(1, rows):
            visible[row] |= visible[parents[row]]
        depths = visible.sum(axis=1) - 1
        seen = [{*range(num_past), *(num_past + np.flatnonzero(line)).tolist()} for line in visible]
    else:
        visible, depths = None, np.arange(rows)
        seen = [set(range(num_past + row + 1)) for row in range(rows)]
    positions = (num_past + depths).astype(np.int32)
    slots = np.random.default_rng(0).permutation(num_past + rows).astype(np.int32)
    segment = Segment(positions, positions, slots[num_past:], slots[:num_past], visible)
    return segment, [*range(num_past), *positions.tolist()], seen


@examples(150)
@given(segments(), st.integers(LEAST_WINDOW, 120), st.booleans())
def test_rows_see_what_they_saw_within_the_window(
    drawn: tuple[Segment, list[int], list[set[int]]], window: int, beside_a_longer_one: bool
) -> None:
    segment, positions, seen = drawn
    cut = within(segment, window)
    check_trees([segment], (window,))
    other = Segment(*(np.arange(260, 360, dtype=np.int32),) * 3, np.arange(360, 500, dtype=np.int32))
    batch = [cut, other] if beside_a_longer_one else [cut]
    rows = max(len(one.slots) for one in batch)
    keys = max(len(one.past) + len(one.slots) for one in batch)
    read, mask = rectangle(batch, rows, keys)
    all_slots = np.concatenate([segment.past, segment.slots])
    for row in range(len(segment.slots)):
        line = np.zeros(keys) if mask is None else mask[0, row]
        expected = {
            int(all_slots[key]) for key in seen[row] if positions[key] > segment.positions[row] - window
        }
        assert set(read[0, line == 0].tolist()) == expected
    # What nobody sees is not read.
    assert len(cut.past) <= max(0, min(len(segment.past), window - 1))


def test_a_tree_deeper_than_the_window_is_no_silent_mistake() -> None:
    rows = np.arange(LEAST_WINDOW + 1, dtype=np.int32)
    visible = np.tri(len(rows), dtype=np.bool_)
    deep = Segment(rows, rows, rows, rows[:0], visible)
    with pytest.raises(ValueError, match="beyond the window"):
        within(deep, LEAST_WINDOW)
    with pytest.raises(ValueError, match="beyond the window"):
        check_trees([deep], (LEAST_WINDOW, 500))
    check_trees([deep], (LEAST_WINDOW + 1,))


@pytest.mark.parametrize("name", WINDOWED)
def test_sequences_reach_beyond_a_window(name: str, tmp_path: Path) -> None:
    """Compared with Transformers' own forward while loading, behind the window too."""
    runner = load_runner(tiny_models.write(name, tmp_path), num_slots=512)
    assert runner.shape.windows == (64,)
    assert runner.shape.max_tokens == 128


def test_the_self_test_notices_windows_that_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.hf_attention.within", lambda segment, window: segment)
    with pytest.raises(UnsupportedModel, match="self-test failed at a prompt longer than its window of 64"):
        load_runner(tiny_models.write("mistral_window", tmp_path), num_slots=512)


@pytest.mark.parametrize("name", ["gemma2_window", "gpt_oss_window"])
def test_the_self_test_notices_scores_that_are_left_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScoredAttention, "_weighted", PaddedAttention._weighted)
    with pytest.raises(UnsupportedModel, match="self-test failed at ragged prefill"):
        load_runner(tiny_models.write(name, tmp_path), num_slots=512)


def test_attention_without_windows_is_refused_by_name(tmp_path: Path) -> None:
    directory = tiny_models.write("gemma3_window", tmp_path)
    with pytest.raises(UnsupportedModel, match="sliding windows, which attention `decomposed` has not"):
        load_runner(directory, num_slots=512, attention="decomposed")
    assert load_runner(directory, num_slots=512, attention="auto").shape.windows == (64,)
    # Where no sequence is longer than the window there is none.
    runner = load_runner(directory, num_slots=512, max_tokens=64, attention="decomposed")
    assert runner.shape.windows == ()


def test_a_window_too_narrow_for_trees_is_refused() -> None:
    model = tiny_models.build("mistral_window")
    model.config.sliding_window = LEAST_WINDOW - 1
    with pytest.raises(UnsupportedModel, match="too few for token trees"):
        HFRunner(model, 512)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_that_rounding_sends_to_other_experts_are_no_mistake(dtype: str, tmp_path: Path) -> None:
    directory = tiny_models.write("gpt_oss_window", tmp_path)
    assert load_runner(directory, num_slots=512, dtype=dtype).shape.expert_share == 0.5


def test_mistakes_in_most_rows_of_a_mixture_are_noticed_in_half_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.rectangles._mask", lambda *_: None)
    with pytest.raises(UnsupportedModel, match="self-test failed"):
        load_runner(tiny_models.write("gpt_oss_window", tmp_path), num_slots=512, dtype="bfloat16")


def test_a_window_that_the_model_s_own_masks_lack_is_refused() -> None:
    model = tiny_models.build("llama")
    with pytest.raises(UnsupportedModel, match="that its own masks do not have"):
        windows_of(model, [Seen(64, is_scored=False)] * 2, 128)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("score_bytes", [1, 64 << 20])
def test_capped_scores_and_sinks_are_softmaxes_of_their_own(
    heads: int, kv_heads: int, score_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.scored_attention.SCORE_BYTES", score_bytes)
    generator = torch.Generator().manual_seed(0)
    rows, dim = 5, 8
    q, k, v = (torch.randn(rows, n, dim, generator=generator) for n in (heads, kv_heads, kv_heads))
    sinks, softcap = torch.randn(heads, generator=generator), 0.7
    attention = ScoredAttention(16, dtype=torch.float32)
    attention.set_scoring(0, Scoring(softcap=softcap, sinks=sinks))
    numbers = np.arange(rows, dtype=np.int32)
    plan = attention.plan([Segment(numbers, numbers, numbers + 3, numbers[:0])])
    got = attention.run(plan, 0, q, k, v, 0.5).view(rows, heads, dim)
    for head in range(heads):
        key, value = (x[:, head // (heads // kv_heads)].double() for x in (k, v))
        for row in range(rows):
            scores = softcap * torch.tanh(key[: row + 1] @ q[row, head].double() * 0.5 / softcap)
            share = torch.cat([scores, sinks[head].double()[None]]).softmax(0)[:-1]
            torch.testing.assert_close(
                got[row, head].double(), share @ value[: row + 1], atol=1e-6, rtol=1e-5
            )
