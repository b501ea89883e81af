"""Checkpoints of random weights are models that load, with the vocabulary of the tokenizer beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import random_checkpoint
from benchmarks.forward_floor import SHAPES
from cluster.model_paths import model_directory
from engine.loading import load_runner


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("random") / "model"
    random_checkpoint.main(
        [
            "--shape",
            "tiny",
            "--tokenizer",
            str(model_directory("zoo:target-8x384")),
            "--device",
            "cpu",
            str(directory),
        ]
    )
    return directory


def test_transformers_and_the_lean_runner_load_the_same_model(written: Path) -> None:
    """The runner's self-test compares its logits with those of Transformers."""
    runner = load_runner(written, dtype="bfloat16", num_slots=128, runner="lean")
    assert runner.shape.vocab_size == 4096
    assert runner.shape.num_layers == SHAPES["tiny"].layers
    model = AutoModelForCausalLM.from_pretrained(written)
    with torch.inference_mode():
        logits = model(torch.arange(12)[None]).logits
    assert 0.1 < float(logits.float().std()) < 10  # neither faded nor grown without bounds


def test_its_index_names_every_weight_and_their_bytes(written: Path) -> None:
    index = json.loads((written / "model.safetensors.index.json").read_text())
    sizes = SHAPES["tiny"]
    assert len(index["weight_map"]) == 3 + 9 * sizes.layers
    assert {path.name for path in written.glob("*.safetensors")} == set(index["weight_map"].values())
    each = sizes.hidden * sizes.head_dim * 2 * (sizes.heads + sizes.kv_heads) + 3 * sizes.hidden * sizes.units
    numbers = sizes.layers * (each + 2 * sizes.hidden) + (2 * 4096 + 1) * sizes.hidden
    assert index["metadata"]["total_size"] == 2 * numbers
