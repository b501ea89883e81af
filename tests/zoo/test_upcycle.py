"""An upcycled model says what the dense one does, through experts that tokens are really sent to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from benchmarks.cli import app
from cluster.config import FlotillaConfig
from engine.loading import load_runner
from engine.runner import ModelRunner, Segment
from tests.random_llama import random_llama
from zoo.registry import TARGET, weights_dir
from zoo.upcycle import upcycle

ROWS = np.arange(12, dtype=np.int32)


def first_logits(runner: ModelRunner) -> torch.Tensor:
    segment = Segment(tokens=ROWS + 5, positions=ROWS, slots=ROWS, past=ROWS[:0])
    return runner.forward([segment], ROWS).clone()


def saved(directory: Path, **changes: bool) -> Path:
    random_llama(0, vocab_size=64, **changes).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(("num_experts", "per_token"), [(6, 2), (3, 1)])
def test_a_random_model_says_the_same_through_experts(
    num_experts: int, per_token: int, tmp_path: Path
) -> None:
    dense, mixture = saved(tmp_path / "dense"), tmp_path / "mixture"
    num_parameters = upcycle(dense, mixture, num_experts, per_token)
    runner = load_runner(mixture, num_slots=64)
    assert runner.shape.expert_share == per_token / num_experts
    assert load_runner(dense, num_slots=64).shape.expert_share == 0.0
    expected = first_logits(load_runner(dense, num_slots=64))
    assert torch.allclose(first_logits(runner), expected, rtol=1e-4, atol=1e-5)
    weights = load_file(mixture / "model.safetensors")
    assert num_parameters == sum(weight.numel() for weight in weights.values())
    # A router that sends all tokens to the same experts would have them cost what a dense layer does.
    hidden = load_file(dense / "model.safetensors")["model.embed_tokens.weight"]
    gate = weights["model.layers.0.block_sparse_moe.gate.weight"]
    assert len((hidden @ gate.T).topk(per_token).indices.unique()) == num_experts


@pytest.mark.thorough
def test_the_demo_target_says_the_same_through_experts(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["upcycle", str(tmp_path / "mixture"), "--experts", "4"])
    assert result.exit_code == 0, result.output
    config = FlotillaConfig.load(tmp_path / "mixture" / "cell.yaml")
    assert [drafter.name for drafter in config.drafters][-1] == "prompt-lookup"
    mixture = first_logits(load_runner(Path(config.target.path), num_slots=64))
    dense = first_logits(load_runner(weights_dir(TARGET), num_slots=64))
    assert torch.allclose(mixture, dense, rtol=1e-3, atol=1e-3)


def test_what_cannot_be_upcycled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be sent to 3 of 2 experts"):
        upcycle(weights_dir(TARGET), tmp_path / "mixture", 2, 3)
    with pytest.raises(ValueError, match="no biases"):
        upcycle(saved(tmp_path / "biased", attention_bias=True), tmp_path / "mixture", 2, 1)
    assert not (tmp_path / "mixture").exists()
    (tmp_path / "there").mkdir()
    result = CliRunner().invoke(app, ["upcycle", str(tmp_path / "there")])
    assert result.exit_code == 2
    assert "there" in result.output
