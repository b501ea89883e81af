"""A deepened model says what the shallow one does, bit for bit, through layers that are really computed."""

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
from engine.runner import Segment
from tests.random_llama import random_llama
from zoo.deepen import deepen
from zoo.registry import TARGET, weights_dir


def first_logits(model: Path) -> torch.Tensor:
    rows = np.arange(6, dtype=np.int32)
    segment = Segment(tokens=rows + 5, positions=rows, slots=rows, past=rows[:0])
    return load_runner(model, num_slots=64).forward([segment], rows).clone()


@pytest.mark.thorough
def test_the_demo_target_says_the_same_through_more_layers(tmp_path: Path) -> None:
    shallow = weights_dir(TARGET)
    result = CliRunner().invoke(app, ["deepen", str(tmp_path / "deep"), "--layers", "11"])
    assert result.exit_code == 0, result.output
    config = FlotillaConfig.load(tmp_path / "deep" / "cell.yaml")
    assert [drafter.name for drafter in config.drafters][-1] == "prompt-lookup"
    deep = Path(config.target.path)
    assert torch.equal(first_logits(deep), first_logits(shallow))
    weights = load_file(deep / "model.safetensors")
    for name, weight in load_file(shallow / "model.safetensors").items():
        assert torch.equal(weights[name], weight)
    added = {name: weight for name, weight in weights.items() if ".layers.10." in name}
    assert len(added) == 9
    # Zeros alone might be skipped by somebody's kernel, and denormals are slow.
    assert 0.01 < float(added["model.layers.10.mlp.up_proj.weight"].float().std()) < 1
    assert not torch.equal(
        added["model.layers.10.mlp.up_proj.weight"], weights["model.layers.9.mlp.up_proj.weight"]
    )


def test_what_cannot_be_deepened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 8 layers, 7 would be fewer"):
        deepen(weights_dir(TARGET), tmp_path / "deep", 7)
    random_llama(0, vocab_size=64, attention_bias=True).save_pretrained(tmp_path / "biased")
    with pytest.raises(ValueError, match="no biases"):
        deepen(tmp_path / "biased", tmp_path / "deep", 3)
    assert not (tmp_path / "deep").exists()
    (tmp_path / "there").mkdir()
    result = CliRunner().invoke(app, ["deepen", str(tmp_path / "there")])
    assert result.exit_code == 2
    assert "there" in result.output
