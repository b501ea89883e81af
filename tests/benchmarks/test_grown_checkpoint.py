"""A grown model says what the small one does, and its numbers are all computed with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks import grown_checkpoint
from benchmarks.forward_floor import SHAPES, Sizes
from benchmarks.grown_checkpoint import Growth, sizes_of, write
from cluster.model_paths import model_directory
from drafters.messages import DraftPlan
from drafters.model_drafter import ModelDrafter
from engine.loading import load_runner
from tests.drafters.tiny import assert_same_tree, call, opening, trees

TARGET, DRAFTER = model_directory("zoo:target-8x384"), model_directory("zoo:drafter-general-2x192")
LARGE = Sizes(layers=10, hidden=768, heads=12, kv_heads=3, head_dim=128, units=1536, vocab=0)
LARGE_DRAFTER = Sizes(layers=3, hidden=256, heads=8, kv_heads=2, head_dim=64, units=640, vocab=0, tied=True)


def logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(tokens).logits
    return found


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("grown") / "target"
    write(directory, TARGET, LARGE, dtype="float32", device="cpu")
    return directory


def test_logits_are_those_of_the_small_model(grown: Path) -> None:
    small = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    large = AutoModelForCausalLM.from_pretrained(grown)
    assert replace(sizes_of(large.config), vocab=0) == LARGE
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 4096, (1, 200)))
    torch.testing.assert_close(logits(large, tokens), logits(small, tokens), atol=2e-3, rtol=1e-3)


def test_what_is_new_is_computed_and_adds_nothing(grown: Path) -> None:
    """Keys and units of new heads and layers are not zero; what they add to the residual stream is."""
    large = AutoModelForCausalLM.from_pretrained(grown)
    for layer in large.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(layer.self_attn, name).weight
            assert float((weight != 0).float().mean()) > 0.6
        assert float((layer.mlp.gate_proj.weight != 0).float().mean()) > 0.99
    assert not bool(large.model.layers[-1].mlp.down_proj.weight.any())
    states = large.model(torch.arange(50)[None], output_hidden_states=True).hidden_states
    assert all(not bool(state[..., 384:].any()) for state in states)
    assert torch.equal(states[8], states[9])


def test_its_drafter_is_right_as_often(tmp_path: Path) -> None:
    """Drafts of a grown drafter are those of the small one, in the lean runner, too."""
    write(tmp_path / "drafter", DRAFTER, LARGE_DRAFTER, dtype="float32", device="cpu")
    small, large = (
        ModelDrafter(load_runner(directory, num_slots=256, dtype="float32"))
        for directory in (DRAFTER, tmp_path / "drafter")
    )
    for seed in range(4):
        prompt = np.random.default_rng(seed).integers(3, 4096, 30).tolist()
        asked = call(opening(f"r{seed}", prompt, DraftPlan(depth=5, width=2)))
        (one,), (other,) = (trees(drafter.draft(asked)).values() for drafter in (small, large))
        assert_same_tree(one, other)


def test_growth_that_cannot_be_is_refused(tmp_path: Path) -> None:
    small = Sizes(layers=8, hidden=384, heads=6, kv_heads=2, head_dim=64, units=1024, vocab=4096)
    with pytest.raises(ValueError, match="fewer layers and hidden and units"):
        write(tmp_path / "a", TARGET, SHAPES["tiny"])
    with pytest.raises(ValueError, match="fewer heads of a key"):
        Growth(small, replace(small, heads=4))
    with pytest.raises(ValueError, match="heads of 64 do not turn by the angles of heads of 96"):
        Growth(small, replace(small, head_dim=96))
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, attention_bias=True
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "biased")
    with pytest.raises(ValueError, match="no Llama model without biases"):
        write(tmp_path / "b", tmp_path / "biased", LARGE)


def test_the_command_grows_by_the_name_of_a_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SHAPES, "1b", LARGE_DRAFTER)
    out = tmp_path / "grown"
    grown_checkpoint.main(["--model", str(DRAFTER), "--shape", "1b", "--device", "cpu", str(out)])
    assert "in the shape of 1b, 0.01 GB" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    small = AutoModelForCausalLM.from_pretrained(DRAFTER, dtype=torch.float32)
    tokens = torch.arange(3, 120)[None]
    same = logits(model, tokens).argmax(-1) == logits(small, tokens).argmax(-1)
    assert float(same.float().mean()) > 0.9  # rounding decides the rest
