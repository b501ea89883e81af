"""Quantized checkpoints and adapters with names that Transformers changes while it loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.checkpoint import Checkpoint
from engine.loading import UnsupportedModel, load_runner
from engine.runner import Segment
from engine.tensor_headers import UnreadableCheckpoint
from tests.engine import tiny_adapters, tiny_models
from tests.engine.test_runners import logits_of

_SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}


def gemma3(directory: Path) -> Path:
    """One of those with a vision tower: 4B and more."""
    text = _SIZES | {"vocab_size": 96, "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        text_config=text | {"max_position_embeddings": 128, "sliding_window": 1024, "pad_token_id": 0},
        vision_config=_SIZES | {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=95,
        boi_token_index=93,
        eoi_token_index=94,
    )
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(directory)
    return directory


def gpt_neox(directory: Path) -> Path:
    return tiny_models.write("gpt_neox", directory)


@pytest.mark.parametrize(
    ("write", "name", "now"),
    [
        (gemma3, "language_model.model.layers.0.self_attn.q_proj", "model.language_model.layers.0"),
        (gpt_neox, "embed_out", "lm_head"),
    ],
)
def test_quantized_weights_are_found_under_the_names_that_they_had(
    write: Callable[[Path], Path], name: str, now: str, tmp_path: Path
) -> None:
    plain, stored = write(tmp_path / "plain"), write(tmp_path / "stored")
    meant = load_file(plain / "model.safetensors")
    made = dict(meant)
    layers = [one for one in meant if one.startswith(name.split(".")[0]) or ".layers." in one]
    for one in (
        one for one in layers if meant[one].dim() == 2 and "vision" not in one and "embed_t" not in one
    ):
        scales = meant[one].abs().amax(1, keepdim=True) / 100
        made[one] = (meant[one] / scales).round().to(torch.int8)
        made[f"{one}_scale"] = scales
        meant[one] = made[one] * scales
    assert f"{name}.weight_scale" in made
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(made, stored / "model.safetensors", metadata={"format": "pt"})
    expected, found = (logits_of(load_runner(one, num_slots=128), 1) for one in (plain, stored))
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)
    made[f"{name}.odd"] = torch.zeros(1)
    save_file(made, stored / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=rf"`{now}.*odd` is no tensor of the model"):
        load_runner(stored, num_slots=128)


def test_two_tensors_are_not_made_one(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1), "b": torch.ones(1)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    swapped = checkpoint.renamed({"a": "b", "b": "a"}.__getitem__)
    assert swapped.read("a").item() == 1
    assert swapped.renamed({"a": "c", "b": "a"}.__getitem__).read("c").item() == 1
    assert (swapped.kind("b"), swapped.shape("b"), checkpoint.read("a").item()) == ("F32", (1,), 0)
    with pytest.raises(UnreadableCheckpoint, match=r"`b` and `a` in .* are one"):
        checkpoint.renamed(lambda _: "c")


def test_an_adapter_may_have_the_names_that_its_model_had(tmp_path: Path) -> None:
    """As PEFT wrote them for Gemma 3 before Transformers 4.52."""
    model = gemma3(tmp_path / "model")
    path = tiny_adapters.write(model, tmp_path / "adapter", seed=1, targets=("o_proj", "up_proj"))
    expected = tiny_adapters.merged(model, path)
    file = path / "adapter_model.safetensors"
    renamed = {
        name.replace("model.language_model.", "language_model.model."): one
        for name, one in load_file(file).items()
    }
    assert any(name.startswith("base_model.model.language_model.model.layers.") for name in renamed)
    save_file(renamed, file, metadata={"format": "pt"})
    runner = load_runner(model, num_slots=128, adapters=[("one", path)])
    tokens = np.arange(3, 23, dtype=np.int32)
    numbers = np.arange(len(tokens), dtype=np.int32)
    segment = Segment(tokens=tokens, positions=numbers, slots=numbers, past=numbers[:0], adapter=1)
    wanted = tiny_adapters.logits(expected, tokens)
    torch.testing.assert_close(runner.forward([segment], numbers), wanted, atol=1e-4, rtol=1e-4)
