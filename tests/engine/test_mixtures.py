"""Mixtures of experts by the lean runner: against Transformers, and experts against each one by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.experts import FeedForward, SeparateExperts
from engine.hf_runner import HFRunner
from engine.linear import Linear
from engine.llama_runner import LlamaRunner
from engine.loading import UnsupportedModel, load_runner
from engine.mixture import Mixture, SharedExpert, TopRouter
from engine.mixture_weights import expert_share, mixture_of, units_of, why_not_experts
from engine.numpy_llama import in_numpy
from engine.tensor_parallel import check_divisible
from tests.engine import tiny_adapters, tiny_models
from tests.engine.test_adapters import loaded, session
from tests.engine.test_runners import logits_of

NAMES = ("mixtral", "qwen2_moe", "qwen3_moe")


@pytest.mark.parametrize("name", NAMES)
def test_lean_and_transformers_runners_agree(name: str, tmp_path: Path) -> None:
    directory = tiny_models.write(name, tmp_path)
    lean = load_runner(directory, num_slots=128)  # passes the self-test, as the other does
    other = load_runner(directory, num_slots=128, runner="hf")
    assert isinstance(lean, LlamaRunner)
    assert isinstance(other, HFRunner)
    assert lean.shape == other.shape
    assert lean.shape.expert_share == (0.4 if name == "mixtral" else 0.5)
    mixtures = [isinstance(layer.mlp, Mixture) for layer in lean.weights.layers]
    assert mixtures == [name != "qwen2_moe", True]
    for got, expected in zip(logits_of(lean, 1), logits_of(other, 1), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert in_numpy(lean) is lean


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_passes_the_self_test(dtype: str, tmp_path: Path) -> None:
    runner = load_runner(tiny_models.write("qwen2_moe", tmp_path), num_slots=128, dtype=dtype)
    assert isinstance(runner, LlamaRunner)


def few_rows_wrong(patch: pytest.MonkeyPatch) -> None:
    real = Mixture.__call__
    patch.setattr(Mixture, "__call__", lambda self, x: real(self, x) * (1000 if len(x) < 8 else 1))


def nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Mixture, "__call__", lambda self, x: torch.zeros_like(x))


def no_gate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SharedExpert, "__call__", lambda self, x: self.expert(x))


def other_sums(patch: pytest.MonkeyPatch) -> None:
    real = TopRouter.__init__
    patch.setattr(
        TopRouter,
        "__init__",
        lambda self, weight, per_row, *, sums_to_one: real(
            self, weight, per_row, sums_to_one=not sums_to_one
        ),
    )


def other_experts(patch: pytest.MonkeyPatch) -> None:
    real = TopRouter.__call__

    def rolled(router: TopRouter, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, weights = real(router, x)
        return chosen.roll(1, dims=1), weights

    patch.setattr(TopRouter, "__call__", rolled)


@pytest.mark.parametrize("mistake", [few_rows_wrong, nothing, no_gate, other_sums, other_experts])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_mistakes_are_noticed_in_whatever_precision(
    dtype: str,
    mistake: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole forwards of half precision are alike in most rows only, and those of few rows in none."""
    directory = tiny_models.write("qwen2_moe", tmp_path)
    mistake(monkeypatch)
    with pytest.raises(UnsupportedModel, match="self-test failed at "):
        load_runner(directory, num_slots=128, dtype=dtype)


@pytest.mark.parametrize("name", NAMES)
def test_the_self_test_notices_rows_at_wrong_experts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_experts(monkeypatch)
    with pytest.raises(UnsupportedModel, match="self-test failed at ragged prefill"):
        load_runner(tiny_models.write(name, tmp_path), num_slots=128)


def test_units_that_ranks_cannot_share_are_told_by_their_name() -> None:
    config = tiny_models.build("qwen2_moe").config
    assert units_of(config) == dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size"), 16
    ) | {"intermediate_size": 48}
    assert units_of(tiny_models.build("qwen3_moe").config) == {"moe_intermediate_size": 16}
    assert units_of(tiny_models.build("mixtral").config) == {"intermediate_size": 48}
    config.shared_expert_intermediate_size = 15
    with pytest.raises(UnsupportedModel, match=r"15 .*`shared_expert_intermediate_size`.* over 2 ranks"):
        check_divisible(config, 2, is_lean=True)


@pytest.mark.parametrize(
    ("name", "changes", "share"),
    [
        ("qwen3_moe", {"num_experts": 0, "num_local_experts": 0}, 0.0),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}, 0.0),
        ("qwen2_moe", {"mlp_only_layers": [], "decoder_sparse_step": 2}, 0.5),
        ("qwen3_moe", {"decoder_sparse_step": 3}, 0.0),
    ],
)
def test_layers_are_mixtures_as_the_model_s_own_code_has_it(
    name: str, changes: dict[str, Any], share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, options = tiny_models._CONFIGS[name]
    changed = f"{name} {changes}"  # what was written under a name is kept
    monkeypatch.setitem(tiny_models._CONFIGS, changed, (family, options | changes))
    directory = tiny_models.write(changed, tmp_path)
    runner = load_runner(directory, num_slots=128)
    assert isinstance(runner, LlamaRunner)
    assert any(isinstance(layer.mlp, Mixture) for layer in runner.weights.layers) is (share > 0)
    assert runner.shape == load_runner(directory, num_slots=128, runner="hf").shape
    assert runner.shape.expert_share == share
    dense = units_of(tiny_models.build(changed).config)
    assert ("intermediate_size" in dense) is (share == 0.0 or "decoder_sparse_step" in changes)


def test_experts_stay_in_the_file_until_they_are_laid_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put together by Transformers they would be another copy of all weights, on every rank."""
    seen = []

    def looking(mlp: Any, *arguments: Any) -> Mixture:
        seen.append(type(mlp.experts).__name__)
        return mixture_of(mlp, *arguments)

    monkeypatch.setattr("engine.llama_weights.mixture_of", looking)
    load_runner(tiny_models.write("mixtral", tmp_path / "one"), num_slots=128)
    assert seen == ["SeparatedExperts"] * 2
    # Files with another naming are left to Transformers.
    other = tiny_models.write("qwen3_moe", tmp_path / "other") / "model.safetensors"
    tensors = load_file(other)
    experts = "model.layers.{}.mlp.experts"
    for layer in (0, 1):
        parts = {
            part: torch.stack([tensors.pop(f"{experts.format(layer)}.{n}.{part}.weight") for n in range(6)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        both = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
        tensors[f"{experts.format(layer)}.gate_up_proj"] = both
        tensors[f"{experts.format(layer)}.down_proj"] = parts["down_proj"]
    save_file(tensors, other, {"format": "pt"})
    seen.clear()
    fused = load_runner(tmp_path / "other", num_slots=128)
    assert seen == ["Qwen3MoeExperts"] * 2
    apart = load_runner(tiny_models.write("qwen3_moe", tmp_path / "apart"), num_slots=128)
    for got, expected in zip(logits_of(fused, 1), logits_of(apart, 1), strict=True):
        torch.testing.assert_close(got, expected)


def test_on_a_gpu_experts_need_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.mixture_weights.why_not_triton", lambda device: "there is none")
    config, gpu = tiny_models.build("mixtral").config, torch.device("cuda")
    assert why_not_experts(config, gpu) == "its experts on cuda need Triton: there is none"
    assert why_not_experts(config, torch.device("cpu")) is None
    assert why_not_experts(tiny_models.build("llama").config, gpu) is None
    assert expert_share(tiny_models.build("gpt_oss_window").config) == 0.0, "left to Transformers"


def test_adapters_of_attention_and_shared_experts_are_served_and_of_others_refused(tmp_path: Path) -> None:
    model = tiny_models.write("mixtral", tmp_path / "model")
    path = tiny_adapters.write(model, tmp_path / "one", seed=1, targets=("q_proj", "o_proj"))
    lean, other = (session(loaded(model, [path], kind), (1, 0, 1)) for kind in ("lean", "hf"))
    for (_, got), (_, expected) in zip(lean, other, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    shared = tiny_models.write("qwen2_moe", tmp_path / "shared")
    layers = ("q_proj", "gate_proj", "up_proj", "down_proj")
    changed = tiny_adapters.write(shared, tmp_path / "two", seed=2, targets=layers)
    lean, other = (session(loaded(shared, [changed], kind), (1, 0, 1)) for kind in ("lean", "hf"))
    for (_, got), (_, expected) in zip(lean, other, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    weights = path / "adapter_model.safetensors"
    tensors = {name.replace("self_attn", "mlp.experts.0"): one for name, one in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"changes `model\.layers\.0\.mlp\.experts\.0"):
        loaded(model, [path], "lean")


def test_what_a_row_gets_does_not_depend_on_others() -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(6, 20, 8, generator=generator)
    down = torch.randn(6, 8, 10, generator=generator)
    experts = SeparateExperts([FeedForward(Linear(a), Linear(b)) for a, b in zip(gate_up, down, strict=True)])
    x = torch.randn(9, 8, generator=generator)
    chosen, weights = TopRouter(torch.randn(6, 8, generator=generator), 3, sums_to_one=True)(x)
    assert torch.allclose(weights.sum(dim=1), torch.ones(9))
    together = experts(x, chosen, weights)
    for row in range(9):
        gate, up = (gate_up[chosen[row]] @ x[row]).chunk(2, dim=1)
        each = (down[chosen[row]] @ (torch.nn.functional.silu(gate) * up).unsqueeze(2)).squeeze(2)
        expected = (each * weights[row].unsqueeze(1)).sum(dim=0)
        torch.testing.assert_close(together[row], expected)
        one = slice(row, row + 1)
        torch.testing.assert_close(experts(x[one], chosen[one], weights[one])[0], expected)
    assert experts(x[:0], chosen[:0], weights[:0]).shape == (0, 8)
