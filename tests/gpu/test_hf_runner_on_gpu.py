"""Transformers models whose forwards are captured, and those that cannot be."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXMLP

from drafters.messages import DraftPlan
from drafters.model_drafter import ModelDrafter
from engine.attention_kinds import AttentionKind
from engine.cuda_graphs import GraphedRunner
from engine.hf_runner import HFRunner
from engine.loading import load_runner
from engine.runner import ModelRunner, Segment
from tests.drafters.both_ways import assert_same
from tests.drafters.tiny import call, following, opening
from tests.emulated_cuda import IS_NEEDED, Emulation
from tests.engine import tiny_models
from tests.gpu.test_runners_on_gpu import ragged

SLOTS, LONGEST = (48, 8) if IS_NEEDED else (96, 48)
#: Keys before a request's rows, and rows, at most: emulated, few.
PAST, ROWS = (3, 2) if IS_NEEDED else (8, 4)
CAPTURED = ["gpt_neox", "gemma4", "qwen3"]


def loaded(directory: Path, device: str, attention: AttentionKind = "triton") -> ModelRunner:
    return load_runner(
        directory,
        num_slots=SLOTS,
        runner="hf",
        attention=attention if device == "cuda" else None,
        device=device,
        self_test=False,
        feature_layers=(0, 1) if directory.name != "gpt_neox" else (),
    )


def prepared(runner: ModelRunner) -> None:
    """Keys and values in every slot."""
    rng = np.random.default_rng(1)
    numbers = np.arange(LONGEST, dtype=np.int32)
    segments = [
        Segment(
            rng.integers(0, tiny_models.VOCABULARY, LONGEST).astype(np.int32),
            numbers,
            numbers + first,
            numbers[:0],
        )
        for first in range(0, SLOTS, LONGEST)
    ]
    runner.forward(segments, np.zeros(1, dtype=np.int32))


@pytest.mark.parametrize("attention", ["padded", "triton"])
@pytest.mark.parametrize("name", CAPTURED)
def test_captured_forwards_are_those_of_a_cpu(
    name: str, attention: AttentionKind, tmp_path: Path, cuda: torch.device
) -> None:
    """Batches of all kinds, each forwarded, captured and replayed; with hidden states and features."""
    if IS_NEEDED and attention == "triton" and name != CAPTURED[0]:
        pytest.skip("emulated, one model with Triton's attention does")
    directory = tiny_models.write(name, tmp_path / name)
    there, here = loaded(directory, "cuda", attention), loaded(directory, "cpu")
    assert isinstance(there, GraphedRunner)
    assert isinstance(here, HFRunner)
    there._captured._capture_at = there._captured._capture_at_beside = 1
    prepared(there), prepared(here)
    rng = np.random.default_rng(0)
    for _ in range(1 if IS_NEEDED else 20):
        segments = ragged(rng, SLOTS, past=PAST, rows=ROWS)
        num_rows = sum(len(segment.slots) for segment in segments)
        keep = np.flatnonzero(rng.random(num_rows) < 0.7).astype(np.int32)
        keep = keep if len(keep) else np.zeros(1, dtype=np.int32)
        expected = here.forward(segments, keep)
        for _ in range(2):
            got = there.forward(segments, keep)
            torch.testing.assert_close(got.cpu(), expected, atol=1e-3, rtol=1e-3)
            rows = np.arange(len(keep), dtype=np.int32)
            final = there.last_hidden(rows).cpu()
            torch.testing.assert_close(final, here.last_hidden(rows), atol=1e-3, rtol=1e-3)
            if there.feature_layers:
                every = np.arange(num_rows, dtype=np.int32)
                features = there.features(every).cpu()
                torch.testing.assert_close(features, here.features(every), atol=1e-3, rtol=1e-3)
            assert there.key_tokens.real == here.key_tokens.real
    assert there.shapes


@pytest.mark.parametrize("name", ["gpt_neox", "mistral_window"])
def test_a_forward_is_a_replay(name: str, tmp_path: Path, emulated: Emulation) -> None:
    there = loaded(tiny_models.write(name, tmp_path / name), "cuda")
    two = np.arange(2, dtype=np.int32)
    for _ in range(2):
        there.forward([Segment(two, two, two, two[:0])], two)
    before = len(emulated.launches)
    there.forward([Segment(two + 2, two + 2, two + 2, two)], two)
    assert emulated.launches[before:] == ["replay"]


def test_a_model_that_waits_is_not_captured(
    tmp_path: Path, cuda: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that chooses its experts on the host."""
    plain = GPTNeoXMLP.forward

    def waiting(self: GPTNeoXMLP, hidden: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = plain(self, hidden)
        return made if float(made.sum()) != 0.5 else hidden

    monkeypatch.setattr(GPTNeoXMLP, "forward", waiting)
    with caplog.at_level(logging.INFO):
        there = loaded(tiny_models.write("gpt_neox", tmp_path / "gpt_neox"), "cuda")
    assert isinstance(there, HFRunner)
    assert there.num_slots == SLOTS
    assert "are not captured: its forward waits for the device" in caplog.text
    prepared(there)


def test_a_capture_that_fails_leaves_a_model_as_it_is(
    tmp_path: Path, cuda: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore of it")

    monkeypatch.setattr("engine.loading.capture", failing)
    there = loaded(tiny_models.write("gpt_neox", tmp_path / "gpt_neox"), "cuda")
    assert isinstance(there, HFRunner)
    assert there.num_slots == SLOTS
    assert "are not captured: CUDA error: operation not permitted" in caplog.text
    assert "more of it" not in caplog.text


def test_such_a_drafter_grows_its_trees_on_the_device(tmp_path: Path, cuda: torch.device) -> None:
    """By captured layers, too: those of the host."""
    directory = tiny_models.write("gpt_neox", tmp_path / "gpt_neox")
    device, host = ModelDrafter(loaded(directory, "cuda")), ModelDrafter(loaded(directory, "cpu"))
    assert device._graphs is not None
    plan = DraftPlan(3, 2)
    items = [opening(str(i), [3 + i, 14, 15, 9], plan) for i in range(2)]
    for _ in range(3):
        assert_same(device.draft(call(*items)), host.draft(call(*items)))
        start = 4 if items[0].spec is not None else items[0].start + 1
        items = [following(str(i), start, [20 + start], plan) for i in range(2)]
    assert device._graphs.shapes
