"""LoRA adapters: each row is computed with its own, as if that were merged into the model's weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.adapted_linear import adapters_on
from engine.adapter_files import read_adapter
from engine.cuda_graphs import GraphedRunner
from engine.experts import FeedForward
from engine.llama_runner import LlamaRunner
from engine.llama_weights import load_llama_weights
from engine.loading import RunnerKind, UnsupportedModel, load_runner
from engine.runner import ModelRunner, Segment
from tests.engine import tiny_adapters, tiny_models

SLOTS = 256
TREE = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=np.bool_)


def session(runner: ModelRunner, adapters: Sequence[int]) -> list[tuple[np.ndarray, torch.Tensor]]:
    """Prompts of several requests in one forward, then a tree after each: paths and the logits of their ends.

    `adapters` has one for each request.
    """
    rng = np.random.default_rng(7)
    found, prompts, used = [], [], 0
    for number, adapter in enumerate(adapters):
        tokens = rng.integers(0, tiny_models.VOCABULARY, 5 + 3 * number).astype(np.int32)
        positions = np.arange(len(tokens), dtype=np.int32)
        slots = positions + np.int32(used)
        prompts.append(Segment(tokens, positions, slots, slots[:0], None, adapter))
        used += len(tokens) + 3
    keep = np.arange(sum(len(one.tokens) for one in prompts), dtype=np.int32)
    logits = runner.forward(prompts, keep).clone()
    for one, own in zip(prompts, logits.split([len(one.tokens) for one in prompts]), strict=True):
        found += [(one.tokens[: n + 1], own[n]) for n in range(len(one.tokens))]
    trees = []
    for one in prompts:
        tokens = rng.integers(0, tiny_models.VOCABULARY, 3).astype(np.int32)
        after = np.int32(len(one.tokens))
        depth = np.array([0, 1, 1], dtype=np.int32)
        slots = one.slots[-1] + np.arange(1, 4, dtype=np.int32)
        trees.append(Segment(tokens, after + depth, slots, one.slots, TREE, one.adapter))
    # Only the last rows of each tree, so that the last layer leaves rows out.
    keep = np.arange(len(trees) * 3, dtype=np.int32).reshape(-1, 3)[:, 1:].ravel()
    logits = runner.forward(trees, keep).clone()
    for index, (one, tree) in enumerate(zip(prompts, trees, strict=True)):
        root = np.append(one.tokens, tree.tokens[0])
        found += [(np.append(root, tree.tokens[leaf]), logits[2 * index + leaf - 1]) for leaf in (1, 2)]
    return found


def two_adapters(model: Path, parent: Path) -> list[Path]:
    """One of all layers, and one of other ranks of some."""
    some = ("q_proj", "v_proj", "down_proj", "dense_4h_to_h")
    ranks = {"v_proj": 2}
    return [
        tiny_adapters.write(model, parent / "first", seed=1, rank=4, alpha=8.0),
        tiny_adapters.write(model, parent / "second", seed=2, rank=6, alpha=12.0, targets=some, ranks=ranks),
    ]


def loaded(model: Path, adapters: Sequence[Path], kind: RunnerKind = "auto", **options: Any) -> ModelRunner:
    named = [(path.name, path) for path in adapters]
    return load_runner(model, num_slots=SLOTS, runner=kind, adapters=named, **options)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", "lean"),
        pytest.param("llama_bias", "lean", marks=pytest.mark.thorough),
        pytest.param("qwen2", "lean", marks=pytest.mark.thorough),
        ("qwen3", "lean"),
        pytest.param("qwen3", "hf", marks=pytest.mark.thorough),
        ("gpt_neox", "hf"),
    ],
)
def test_rows_are_computed_with_their_own_adapter(name: str, kind: RunnerKind, tmp_path: Path) -> None:
    model = tiny_models.write(name, tmp_path / "model")
    paths = two_adapters(model, tmp_path)
    # Loading compares each adapter with Transformers; here they are mixed in one forward.
    runner = loaded(model, paths, kind)
    assert isinstance(runner, LlamaRunner) == (kind == "lean")
    adapters = (1, 0, 2, 1, 0)
    models = [tiny_adapters.merged(model, path) for path in (None, *paths)]
    found = session(runner, adapters)
    expected_of = session_adapters(adapters)
    differs = 0
    for (tokens, logits), adapter in zip(found, expected_of, strict=True):
        expected = tiny_adapters.logits(models[adapter], tokens)[-1]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        without = tiny_adapters.logits(models[0], tokens)[-1]
        differs += adapter > 0 and float((without - expected).abs().max()) > 0.05
    assert differs == sum(adapter > 0 for adapter in expected_of)  # else equality would say nothing


def session_adapters(adapters: Sequence[int]) -> list[int]:
    """The adapter of each pair that `session` returns."""
    prompts = [adapter for number, adapter in enumerate(adapters) for _ in range(5 + 3 * number)]
    return prompts + [adapter for adapter in adapters for _ in range(2)]


@pytest.mark.parametrize("kind", ["lean", "hf"])
def test_rows_without_an_adapter_are_as_if_there_were_none(kind: RunnerKind, tmp_path: Path) -> None:
    model = tiny_models.write("llama", tmp_path / "model")
    runner = loaded(model, two_adapters(model, tmp_path), kind)
    plain = load_runner(model, num_slots=SLOTS, runner=kind)
    beside, alone = session(runner, (0, 1, 0, 2)), session(plain, (0, 0, 0, 0))
    of = session_adapters((0, 1, 0, 2))
    for (_, with_others), (_, expected), adapter in zip(beside, alone, of, strict=True):
        if adapter == 0:
            assert torch.equal(with_others, expected)  # bit by bit
    for (_, left), (_, right) in zip(session(runner, (0, 0, 0, 0)), alone, strict=True):
        assert torch.equal(left, right)


def test_captured_forwards_have_adapters(tmp_path: Path) -> None:
    model = tiny_models.write("llama", tmp_path / "model")
    paths = two_adapters(model, tmp_path)
    plain = loaded(model, paths)
    captured = GraphedRunner(loaded(model, paths), capture_at=1)
    for adapters in ((1, 0, 2), (0, 0, 0), (2, 2, 1)):
        for (_, left), (_, right) in zip(session(captured, adapters), session(plain, adapters), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
    shapes = captured.shapes
    assert {shape.is_adapted for shape in shapes} == {True, False}
    # A batch without adapters does not pay for them, nor does one with them go without.
    assert not any(
        one.serves(other) for one in shapes for other in shapes if one.is_adapted != other.is_adapted
    )


def test_an_adapter_of_half_precision_weights_is_the_same_model(tmp_path: Path) -> None:
    model = tiny_models.build("llama").half()
    model.save_pretrained(tmp_path / "model")
    path = tiny_adapters.write(tmp_path / "model", tmp_path / "first", seed=1)
    tensors = {name: one.half() for name, one in load_file(path / "adapter_model.safetensors").items()}
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    oracle = tiny_adapters.merged(tmp_path / "model", path)
    for tokens, logits in session(loaded(tmp_path / "model", [path]), (1,)):
        torch.testing.assert_close(logits, tiny_adapters.logits(oracle, tokens)[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["lean", pytest.param("hf", marks=pytest.mark.thorough)])
def test_adapters_beside_weights_of_eight_bits(kind: RunnerKind, tmp_path: Path) -> None:
    """Loading compares them with Transformers, whose weights are rounded alike."""
    model = tiny_models.write("llama", tmp_path / "model")
    runner = loaded(model, two_adapters(model, tmp_path), kind, quantization="fp8")
    found, without = session(runner, (1, 2)), session(runner, (0, 0))
    assert all(not torch.equal(one, other) for (_, one), (_, other) in zip(found, without, strict=True))


def test_the_scale_is_what_peft_says(tmp_path: Path) -> None:
    model = tiny_models.write("llama", tmp_path / "model")
    ranks = {"use_rslora": True, "alpha_pattern": {r"layers.1.self_attn.q_proj": 3.0, "v_proj": 2.0}}
    path = tiny_adapters.write(model, tmp_path / "one", seed=1, rank=4, alpha=6.0, **ranks)
    stored = load_file(path / "adapter_model.safetensors")
    read = read_adapter("one", path)
    assert read.rank == 4
    assert len(read.modules) == 14
    for name, low in read.modules.items():
        alpha = 3.0 if name.endswith("1.self_attn.q_proj") else 2.0 if name.endswith("v_proj") else 6.0
        up = stored[f"base_model.model.{name}.lora_B.weight"]
        torch.testing.assert_close(low.up, up * (alpha / 2.0))  # the square root of the rank
        assert torch.equal(low.down, stored[f"base_model.model.{name}.lora_A.weight"])


def test_the_scale_of_an_adapter_that_names_none(tmp_path: Path) -> None:
    """`lora_alpha` is 8 then, whatever the rank, as PEFT has it."""
    model = tiny_models.write("llama_least", tmp_path / "model")
    path = tiny_adapters.write(model, tmp_path / "one", seed=1, rank=4)
    file = path / "adapter_config.json"
    config = json.loads(file.read_text())
    del config["lora_alpha"]
    file.write_text(json.dumps(config))
    stored = load_file(path / "adapter_model.safetensors")
    for name, low in read_adapter("one", path).modules.items():
        torch.testing.assert_close(low.up, stored[f"base_model.model.{name}.lora_B.weight"] * 2.0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"peft_type": "IA3"}, "`peft_type` is 'IA3'"),
        ({"use_dora": True}, r"DoRA\) \(`use_dora`\)"),
        ({"bias": "lora_only"}, "biases of its own"),
        ({"modules_to_save": ["lm_head"]}, "`modules_to_save`"),
        (
            {"init_lora_weights": "pissa_niter_16"},
            "weights that `init_lora_weights` 'pissa_niter_16' has changed",
        ),
        ({"init_lora_weights": "lora_ga"}, "weights that `init_lora_weights` 'lora_ga' has changed"),
        ({"use_qalora": True}, r"QA-LoRA\) \(`use_qalora`\)"),
        ({"use_bdlora": {"nblocks": 2}}, r"BD-LoRA\) \(`use_bdlora`\); merge it"),
        ({"kasa_config": {"beta": 0.1}}, r"KaSA\) \(`kasa_config`\); merge it"),
        ({"monteclora_config": {"num_samples": 8}}, r"MonteCLoRA\) \(`monteclora_config`\); merge it"),
        ({"velora_config": {"rank": 1}}, r"VeLoRA\) \(`velora_config`\); merge it"),
        ({"arrow_config": {"top_k": 3}}, r"Arrow\) \(`arrow_config`\); merge it"),
        ({"target_parameters": ["experts.weight"]}, "`target_parameters`"),
    ],
)
def test_more_than_sums_of_low_rank_is_refused(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    model = tiny_models.write("llama_least", tmp_path / "model")
    path = tiny_adapters.write(model, tmp_path / "one", seed=1, **change)
    with pytest.raises(UnsupportedModel, match=why):
        read_adapter("one", path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"lora_alpha": None}, "`lora_alpha` in adapter_config.json is None, not a number"),
        ({"lora_alpha": "16"}, "`lora_alpha` in adapter_config.json is '16', not a number"),
        ({"alpha_pattern": {"q_proj": None}}, "`alpha_pattern.q_proj` in adapter_config.json is None"),
        ({"alpha_pattern": ["q_proj"]}, r"`alpha_pattern` in adapter_config.json is \['q_proj'\]"),
        ({"alpha_pattern": {"q_proj(": 3}}, r"'q_proj\(' in `alpha_pattern` .* is no pattern: missing \)"),
    ],
)
def test_scales_that_are_none_are_told(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    model = tiny_models.write("llama_least", tmp_path / "model")
    path = tiny_adapters.write(model, tmp_path / "one", seed=1, **change)
    with pytest.raises(UnsupportedModel, match=f"adapter 'one': cannot read the adapter in .*: {why}"):
        read_adapter("one", path)


def test_broken_adapters_are_refused_by_name(tmp_path: Path) -> None:
    model = tiny_models.write("llama_least", tmp_path / "model")
    path = tiny_adapters.write(model, tmp_path / "one", seed=1)
    weights = path / "adapter_model.safetensors"
    tensors = load_file(weights)
    first = next(iter(tensors))

    def refused(changed: dict[str, torch.Tensor], why: str) -> None:
        save_file(changed, weights, metadata={"format": "pt"})
        with pytest.raises(UnsupportedModel, match=why):
            loaded(model, [path])

    half = first.replace("lora_A", "lora_B") if "lora_A" in first else first.replace("lora_B", "lora_A")
    refused({name: one for name, one in tensors.items() if name != half}, "lacks its other half")
    refused(
        {**tensors, "base_model.model.lm_head.weight": torch.zeros(2, 2)}, "no part of a LoRA.*; merge it"
    )
    refused({**tensors, first: torch.full_like(tensors[first], torch.nan)}, "NaN or infinite")
    refused(
        {name: one[:0] if "lora_A" in name else one[:, :0].clone() for name, one in tensors.items()},
        "do not fit",
    )
    refused({}, "holds no weights")
    other = tiny_models.write("qwen3", tmp_path / "other")
    wider = tiny_adapters.write(other, tmp_path / "wider", seed=1)
    with pytest.raises(
        UnsupportedModel, match=r"is another model's: `model\.layers\.0\.self_attn\.q_proj` is"
    ):
        loaded(model, [wider])
    weights.write_bytes(weights.read_bytes()[:20])
    with pytest.raises(UnsupportedModel, match="adapter 'one': cannot read the adapter in"):
        loaded(model, [path])
    weights.unlink()
    with pytest.raises(UnsupportedModel, match="other formats than safetensors"):
        loaded(model, [path])
    (path / "adapter_config.json").unlink()
    with pytest.raises(UnsupportedModel, match="no adapter in"):
        loaded(model, [path])


@pytest.mark.parametrize("kind", ["lean", "hf"])
def test_layers_that_no_row_could_have_alone_are_refused(kind: RunnerKind, tmp_path: Path) -> None:
    model = tiny_models.write("llama_scaled", tmp_path / "model")
    path = tiny_adapters.write(model, tmp_path / "one", seed=1, targets=("q_proj", "lm_head"))
    with pytest.raises(UnsupportedModel, match="adapter 'one' changes `lm_head`"):
        loaded(model, [path], kind)


def test_experts_are_refused(tmp_path: Path) -> None:
    model = tiny_models.write("llama", tmp_path / "model")
    path = tiny_adapters.write(model, tmp_path / "one", seed=1, targets=("q_proj",))
    weights = path / "adapter_model.safetensors"
    tensors = {name.replace("self_attn", "mlp.experts.0"): one for name, one in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match="another model's: LlamaForCausalLM has no"):
        loaded(model, [path], "hf")


def test_loading_finds_an_adapter_that_is_computed_wrongly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_models.write("llama", tmp_path / "model")
    paths = two_adapters(model, tmp_path)
    monkeypatch.setattr(  # whoever has one is given the first
        "engine.llama_runner.adapters_on",
        lambda segments, device: (
            None if (found := adapters_on(segments, device)) is None else found.clamp(max=1)
        ),
    )
    with pytest.raises(UnsupportedModel, match="self-test failed at ragged prefill"):
        loaded(model, paths)


def test_another_adapter_is_another_self_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOTILLA_CACHE", str(tmp_path / "cache"))
    model = tiny_models.write("llama", tmp_path / "model")
    path = tiny_adapters.write(model, tmp_path / "one", seed=1)
    first = session(loaded(model, [path]), (1,))
    # By the record, without Transformers; the same numbers.
    for (_, left), (_, right) in zip(session(loaded(model, [path]), (1,)), first, strict=True):
        assert torch.equal(left, right)
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 16.0}))
    changed = session(loaded(model, [path]), (1,))
    oracle = tiny_adapters.merged(model, path, scale=4.0)
    for tokens, logits in changed:
        torch.testing.assert_close(logits, tiny_adapters.logits(oracle, tokens)[-1], rtol=1e-4, atol=1e-4)


def test_an_adapter_adds_nothing_where_it_has_no_layers(tmp_path: Path) -> None:
    model = tiny_models.write("llama", tmp_path / "model")
    path = tiny_adapters.write(model, tmp_path / "one", seed=1, targets=("gate_proj",))
    weights = load_llama_weights(tiny_models.build("llama"), adapters=[read_adapter("one", path)])
    assert type(weights.layers[0].qkv).__name__ == "Linear"
    assert isinstance(weights.layers[0].mlp, FeedForward)
    assert type(weights.layers[0].mlp.gate_up).__name__ == "AdaptedLinear"
