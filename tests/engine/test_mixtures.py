"""Mixtures of experts by the lean runner: against Transformers, and experts against each one by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import mixture_weights
from engine.experts import Expert, SeparateExperts
from engine.hf_runner import HFRunner
from engine.linear import Linear
from engine.llama_runner import LlamaRunner
from engine.loading import UnsupportedModel, load_runner
from engine.mixture import Mixture, TopRouter
from engine.mixture_weights import expert_share, units_of, why_not_experts
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


@pytest.mark.parametrize("name", NAMES)
def test_the_self_test_notices_rows_at_wrong_experts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TopRouter.__call__

    def wrong(router: TopRouter, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, weights = real(router, x)
        return chosen.roll(1, dims=1), weights

    monkeypatch.setattr(mixture_weights.TopRouter, "__call__", wrong)
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


def test_on_a_gpu_experts_need_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.mixture_weights.why_not_triton", lambda device: "there is none")
    config, gpu = tiny_models.build("mixtral").config, torch.device("cuda")
    assert why_not_experts(config, gpu) == "its experts on cuda need Triton: there is none"
    assert why_not_experts(config, torch.device("cpu")) is None
    assert why_not_experts(tiny_models.build("llama").config, gpu) is None
    assert expert_share(tiny_models.build("gpt_oss_window").config) == 0.0, "left to Transformers"


def test_adapters_of_attention_are_served_and_of_experts_refused(tmp_path: Path) -> None:
    model = tiny_models.write("mixtral", tmp_path / "model")
    path = tiny_adapters.write(model, tmp_path / "one", seed=1, targets=("q_proj", "o_proj"))
    lean, other = (session(loaded(model, [path], kind), (1, 0, 1)) for kind in ("lean", "hf"))
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
    experts = SeparateExperts([Expert(Linear(a), Linear(b)) for a, b in zip(gate_up, down, strict=True)])
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
