"""Directories of EAGLE-3 drafters: both published layouts are read, what does not fit is refused by name."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.devices import Memory
from engine.eagle_config import (
    UnsuitableEagle,
    check_eagle_target,
    feature_layers,
    is_eagle,
    read_eagle_config,
)
from engine.eagle_loading import EagleFiles
from engine.eagle_weights import EagleWeights, load_eagle_weights
from engine.kv_budget import KVBudget, NotEnoughMemory
from engine.llama_runner import LlamaRunner
from engine.llama_weights import load_llama_weights
from engine.loading import UnsupportedModel, load_runner
from tests.eagle_reference import EagleReference
from tests.random_llama import random_llama

TARGET = random_llama(0, vocab_size=61, max_position_embeddings=64)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    TARGET.config.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def load(directory: Path) -> EagleWeights:
    config = read_eagle_config(directory)
    cpu = torch.device("cpu")
    return load_eagle_weights(directory, config, max_tokens=64, dtype=torch.float32, device=cpu)


def rewrite(directory: Path, **changes: Any) -> Path:
    """Change `config.json`; None removes a field."""
    described = json.loads((directory / "config.json").read_text()) | changes
    described = {name: value for name, value in described.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(described))
    return directory


def as_speculators(reference: EagleReference, directory: Path) -> Path:
    """The same drafter as the speculators library writes it."""
    reference.write(directory)
    flat = dict(reference.config)
    of_layer = {name: flat.pop(name) for name in list(flat) if name not in _OUTSIDE}
    flat |= {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": of_layer,
        "eagle_aux_hidden_state_layer_ids": list(reference.layers),
    }
    (directory / "config.json").write_text(json.dumps(flat))
    renamed = {name.replace("midlayer.", "layers.0."): x for name, x in reference.weights.items()}
    save_file(renamed, directory / "model.safetensors")
    return directory


_OUTSIDE = (
    "architectures",
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "norm_output",
)


def test_both_layouts_and_pickled_tensors_hold_the_same_drafter(tmp_path: Path) -> None:
    reference = EagleReference(TARGET, draft_tokens=range(5, 40), norm_before_residual=True, layers=(0, 1, 1))
    flat, nested = reference.write(tmp_path / "flat"), as_speculators(reference, tmp_path / "nested")
    pickled = reference.write(tmp_path / "pickled")
    (pickled / "model.safetensors").unlink()
    torch.save(reference.weights, pickled / "pytorch_model.bin")
    assert is_eagle(flat)
    assert is_eagle(nested)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    first = load(flat)
    assert read_eagle_config(nested).feature_layers == read_eagle_config(flat).feature_layers == (0, 1, 1)
    for other in (load(nested), load(pickled)):
        torch.testing.assert_close(other.combine(x), first.combine(x), atol=0, rtol=0)
        assert other.token_of is not None
        assert other.token_of.tolist() == list(range(5, 40))
        torch.testing.assert_close(other.rotation, first.rotation, atol=0, rtol=0)
    # The speculators library has it on where it is not said.
    assert read_eagle_config(rewrite(nested, norm_before_residual=None)).norm_before_residual
    assert not read_eagle_config(rewrite(flat, norm_before_residual=None)).norm_before_residual


@pytest.mark.parametrize("num_layers", [1, 40])
def test_checkpoints_of_the_eagle_repository_have_their_target_s_architecture(
    tmp_path: Path, num_layers: int
) -> None:
    """As EAGLE3-LLaMA3.1-Instruct-8B; EAGLE3-Vicuna1.3-13B has its target's number of layers, too."""
    directory = EagleReference(TARGET, draft_tokens=range(5, 40)).write(tmp_path)
    rewrite(directory, architectures=["LlamaForCausalLM"], num_hidden_layers=num_layers)
    assert is_eagle(directory)
    assert load(directory).token_of is not None


@pytest.mark.parametrize(
    ("named", "inputs"),
    [((2, 18, 33), (2, 18, 33)), ((1, 17, 32), (2, 18, 33)), ((24, 30, 35), (24, 30, 35))],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_layers_are_named_by_their_inputs_or_their_outputs(
    tmp_path: Path, named: tuple[int, ...], inputs: tuple[int, ...], is_nested: bool
) -> None:
    """Of a target of 36 layers, whose usual ones are the first: as vLLM names them, and as SpecForge does."""
    ids = {"eagle_aux_hidden_state_layer_ids": list(named)}
    directory = EagleReference(TARGET).write(tmp_path)
    rewrite(directory, **({"eagle_config": ids} if is_nested else ids))
    assert read_eagle_config(directory).feature_layers == inputs
    assert feature_layers(36) == (2, 18, 33)


def test_a_sliding_window_that_is_not_used_is_none(tmp_path: Path) -> None:
    """As in SpecForge's configurations for Gemma 3 and Qwen2.5-VL, which have their targets' windows."""
    directory = EagleReference(TARGET).write(tmp_path)
    load(rewrite(directory, sliding_window=512, use_sliding_window=False))


def test_the_norm_before_the_features_are_combined_may_be_named_inside(tmp_path: Path) -> None:
    directory = EagleReference(TARGET, norm_before_fc=True).write(tmp_path)
    rewrite(directory, norm_before_fc=None, eagle_config={"norm_before_fc": True})
    assert load(directory).feature_norm is not None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("fc.weight", None, "no weights `fc.weight`"),
        ("fc.weight", torch.zeros(3, 4), r"`fc.weight` of \[3, 4\]"),
        ("midlayer.self_attn.q_proj.bias", torch.zeros(32), "not understood: .*q_proj.bias"),
        ("d2t", None, "lacks `d2t`"),
        ("d2t", torch.full((35,), 30), "tokens in `d2t` that the target does not have"),
        ("lm_head.weight", None, "no lm_head"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    tmp_path: Path, name: str, value: torch.Tensor | None, message: str
) -> None:
    reference = EagleReference(TARGET, draft_tokens=range(5, 40))
    reference.weights.pop(name, None)
    if value is not None:
        reference.weights[name] = value
    with pytest.raises(UnsuitableEagle, match=message):
        load(reference.write(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}, "names neither"),
        ({"architectures": ["LlamaForCausalLM"], "speculators_model_type": "dflash"}, "names neither"),
        ({"num_hidden_layers": "one"}, "cannot read"),
        ({"num_hidden_layers": 3}, "3 layers"),
        ({"fc_norm": True}, "`fc_norm`"),
        ({"model_type": "qwen3"}, "a layer of type qwen3"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"sliding_window": 512}, "sliding window"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, "2 hidden states"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "last hidden state only"),
        ({"hidden_size": "wide"}, "cannot read"),
    ],
)
def test_drafters_of_other_kinds_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    directory = rewrite(EagleReference(TARGET).write(tmp_path), **changes)
    with pytest.raises(UnsuitableEagle, match=message):
        read_eagle_config(directory)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1", "cannot read the weights in"),
        ("pytorch_model.bin", b"version https://git-lfs.github.com/spec/v1", "other things than tensors"),
        ("pytorch_model.bin", pickle.dumps([1, 2], protocol=2), "cannot read the weights in"),
        ("pytorch_model.bin", b"", "cannot read the weights in"),
    ],
)
def test_files_that_hold_no_weights_are_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    """Such as those that a clone without its large files leaves."""
    directory = EagleReference(TARGET).write(tmp_path)
    (directory / "model.safetensors").unlink()
    (directory / name).write_bytes(content)
    with pytest.raises(UnsuitableEagle, match=message):
        load(directory)


def test_a_layer_that_transformers_refuses_is_refused_with_its_directory(tmp_path: Path) -> None:
    directory = EagleReference(TARGET).write(tmp_path)
    load(rewrite(directory, layer_types=["full_attention"] * 36))  # the target's
    for changes in ({"rope_scaling": {"rope_type": "mrope"}}, {"rms_norm_eps": "small"}):
        EagleReference(TARGET).write(directory)
        with pytest.raises(UnsuitableEagle, match=f"{directory} has a configuration of no Llama layer"):
            load(rewrite(directory, **changes))


def test_drafters_of_other_targets_are_refused(tmp_path: Path, target: Path) -> None:
    directory = EagleReference(TARGET).write(tmp_path / "eagle")
    check_eagle_target(read_eagle_config(directory), target)
    assert EagleFiles.of(directory, target).layers == feature_layers(2)
    for changes, message in (
        ({"vocab_size": 60}, "vocab_size 60"),
        ({"target_hidden_size": 16}, "hidden_size 16"),
        ({"target_sha256": "0" * 64, "target": "another"}, "trained for another"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}, "layers 0, 1, 2"),
    ):
        EagleReference(TARGET).write(directory)
        with pytest.raises(UnsuitableEagle, match=message):
            EagleFiles.of(rewrite(directory, **changes), target)
    (directory / "config.json").unlink()
    assert not is_eagle(directory)
    with pytest.raises(UnsuitableEagle, match="no EAGLE-3 drafter"):
        read_eagle_config(directory)


def test_a_drafter_that_is_named_as_a_model_is_refused(tmp_path: Path) -> None:
    """Transformers loads one as a Llama of random weights, which would draft nonsense."""
    directory = EagleReference(TARGET).write(tmp_path)
    for architecture in ("LlamaForCausalLMEagle3", "LlamaForCausalLM"):
        rewrite(directory, architectures=[architecture])
        with pytest.raises(UnsupportedModel, match="use it with `kind: eagle`"):
            load_runner(directory, num_slots=64)


def test_a_runner_that_keeps_no_features_is_refused(tmp_path: Path, target: Path) -> None:
    files = EagleFiles.of(EagleReference(TARGET).write(tmp_path / "eagle"), target)
    with pytest.raises(UnsuitableEagle, match="LlamaRunner does not keep"):
        files.load(LlamaRunner(load_llama_weights(TARGET), 64), 16)


def test_a_layer_that_does_not_fit_beside_the_target_says_so(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **named: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    files = EagleFiles.of(EagleReference(TARGET).write(tmp_path / "eagle"), target)
    runner = LlamaRunner(load_llama_weights(TARGET), 64)
    runner.keep_features(files.layers)
    monkeypatch.setattr("engine.eagle_loading.load_eagle_weights", full)
    with pytest.raises(NotEnoughMemory, match=r"eagle does not fit .* fewer num_slots \(CUDA out of memory"):
        files.load(runner, 16)


def test_the_pool_leaves_room_for_what_drafts_beside_the_target(tmp_path: Path, target: Path) -> None:
    files = EagleFiles.of(EagleReference(TARGET).write(tmp_path / "eagle"), target)
    beside = files.beside("float32", 100)
    assert beside.bytes_per_slot == 2 * 2 * 8 * 4  # keys and values, heads, their size, bytes
    weights = (tmp_path / "eagle" / "model.safetensors").stat().st_size
    assert beside.num_bytes == 2 * weights + 100 * beside.bytes_per_slot  # may be stored in half the bytes
    memory = Memory(total=2_000_000, free=2_000_000, own=0)
    alone, both = KVBudget("cuda", memory, 1.0), KVBudget("cuda", memory, 1.0, beside=beside)
    assert alone.slots(128) == 2_000_000 // 128
    assert both.slots(128) == (2_000_000 - beside.num_bytes) // (128 + beside.bytes_per_slot)
    alone.check(9_000, 128)
    with pytest.raises(NotEnoughMemory, match="what drafts beside the model needs"):
        both.check(9_000, 128)
