"""Checkpoints with weights of integers give the logits that their numbers, zero points and scales mean."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig

from benchmarks.transformers_engine import load_model
from engine.checkpoint import Checkpoint
from engine.integer_formats import from_int8, from_packed, from_qweight
from engine.integer_module import StoredIntegerLinear
from engine.integer_weight import IntegerWeight
from engine.loading import RunnerKind, UnsupportedModel, load_runner
from engine.quantized_checkpoint import load
from engine.stored_linear import StoredLinear
from engine.weight_parts import joined, weight_of
from tests.engine import integer_models, tiny_models
from tests.engine.integer_models import Format
from tests.engine.test_runners import logits_of

# q[input, output] and zero points, in words as the packers of vLLM 0.32 (`gptq_pack`, `awq_pack`) and
# compressed-tensors 0.17 (`pack_to_int32`) give them.
INPUT, OUTPUT = torch.arange(16)[:, None], torch.arange(8)[None]
NUMBERS = (5 * INPUT + 7 * OUTPUT + INPUT * OUTPUT) % 16
ZEROS = (3 * INPUT[:2] + 7 * OUTPUT) % 16
SCALES = torch.linspace(0.5, 2.0, 16).view(2, 8)
MEANT = ((NUMBERS - ZEROS.repeat_interleave(8, 0)) * SCALES.repeat_interleave(8, 0)).T
GPTQ = [
    [1049950800, 459248599, -132498338, -707406379, -1299153316, -1621420077, 2081861722, 1506892241],
    [-1239649576, 459248599, 1888662742, -707406379, 974714580, -1621420077, -190957358, 1506892241],
]
AWQ = [
    *(324512992, -572697259, -1756164406, 1373222719, 459235492, -707454695, -1621376370, 1506900979),
    *(324478056, -572662307, -1756133822, 1373192119, 459270188, -707423855, -1621407226, 1506931579),
]
AWQ_ZEROS = [324512992, 1183506195]
PACKED_ZEROS = [440163952, 1299153315]
EIGHT_BITS = [
    [-1131123644, 1555336292, 2085923972, -1670099804],
    [-1940083588, 1285319868, -1940083588, 1285319868],
]


def words(numbers: object) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def integers(weight: IntegerWeight | torch.Tensor) -> IntegerWeight:
    assert isinstance(weight, IntegerWeight)
    return weight


def test_words_of_other_packers() -> None:
    awq = {"qweight": words(AWQ)[:, None], "qzeros": words(AWQ_ZEROS)[:, None], "scales": SCALES}
    weight = integers(from_qweight(awq, (8, 16), is_symmetric=False, is_v2=False))
    assert torch.equal(weight.dequantized(torch.float32), MEANT)
    # Zero points along outputs, as GPTQ has them, too: by its second version, they are what they are.
    gptq = {"qweight": words(GPTQ), "qzeros": words(PACKED_ZEROS)[:, None], "scales": SCALES}
    weight = integers(from_qweight(gptq, (8, 16), is_symmetric=False, is_v2=True))
    assert torch.equal(weight.dequantized(torch.float32), MEANT)
    weight = integers(from_qweight(gptq, (8, 16), is_symmetric=False, is_v2=False))
    assert torch.equal(weight.zeros[:, 0].int(), (ZEROS[0] + 1) % 16)
    packed = {
        "weight_packed": words(GPTQ).T.contiguous(),
        "weight_scale": SCALES.T,
        "weight_zero_point": words(PACKED_ZEROS)[None],
    }
    assert torch.equal(integers(from_packed(packed, (8, 16))).dequantized(torch.float32), MEANT)
    eight = {"weight_packed": words(EIGHT_BITS), "weight_scale": torch.ones(2, 1)}
    expected = (NUMBERS.T[:2] * 8 - 60).float()
    assert torch.equal(integers(from_packed(eight, (2, 16))).dequantized(torch.float32), expected)


@pytest.mark.parametrize("is_v2", [False, True])
@pytest.mark.parametrize(("stored", "meant"), [(7, 8), (8, 8)])
def test_symmetric_zero_points_tell_which_version_they_are_of(stored: int, meant: int, is_v2: bool) -> None:
    points = words([sum(stored << 4 * place for place in range(7))] * 2)  # the last of eight outputs is none
    tensors = {"qweight": words(GPTQ)[:, :7], "qzeros": points[:, None], "scales": SCALES[:, :7]}
    weight = integers(from_qweight(tensors, (7, 16), is_symmetric=True, is_v2=is_v2))
    assert weight.zeros.unique().tolist() == [meant]


@pytest.mark.parametrize(
    ("about", "is_v2"),
    [
        ({"quant_method": "gptq"}, False),
        ({"quant_method": "gptq", "checkpoint_format": "gptq_v2"}, True),
        ({"quant_method": "gptq", "format": "gptq_v2"}, True),
        ({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, False),
        ({"quant_method": "intel/auto-round", "backend": "auto_round:gptq:exllamav2"}, False),
        ({"quant_method": "intel/auto-round", "backend": "auto_round:exllamav2"}, True),
        ({"quant_method": "auto-round", "packing_format": "auto_round:gptqmodel"}, True),
        ({"quant_method": "auto-round", "packing_format": "auto_round"}, True),
    ],
)
def test_whose_zero_points_are_one_less(about: dict[str, Any], is_v2: bool, tmp_path: Path) -> None:
    integer_models.write("llama", "gptq-v2", tmp_path)
    described_anew(tmp_path, lambda config: config.update(quantization_config=about))
    model = load(Checkpoint(tmp_path), AutoConfig.from_pretrained(tmp_path), torch.float32)
    stored = load_file(tmp_path / "model.safetensors")[f"{LAYER}.qzeros"]
    points = torch.stack([stored >> shift & 15 for shift in range(0, 32, 4)], 2).flatten(1).T
    found = model.get_submodule(LAYER).matrix.zeros
    assert torch.equal(found.int(), points if is_v2 else (points + 1) & 15)


@pytest.fixture(scope="module")
def logits_before(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[torch.Tensor]]:
    """The logits of a model by its name, before its weights were rounded."""

    @functools.cache
    def logits(name: str) -> list[torch.Tensor]:
        directory = tiny_models.write(name, tmp_path_factory.mktemp("float") / name)
        return logits_of(load_runner(directory, num_slots=128), 1)

    return logits


@pytest.mark.parametrize("format", get_args(Format))
def test_the_logits_are_those_of_the_numbers(
    format: Format, tmp_path: Path, logits_before: Callable[[str], list[torch.Tensor]]
) -> None:
    name = {"gptq": "llama", "awq": "qwen2", "packed": "llama_bias", "int8": "qwen3"}[format.split("-")[0]]
    meant = integer_models.write(name, format, tmp_path / "stored")
    plain = tiny_models.build(name)
    with torch.no_grad():
        for layer, matrix in meant.items():
            plain.get_submodule(layer).weight.copy_(torch.from_numpy(matrix))
    plain.save_pretrained(tmp_path / "plain")
    expected = logits_of(load_runner(tmp_path / "plain", num_slots=128), 1)
    assert float((logits_before(name)[0] - expected[0]).abs().max()) > 1e-4
    kinds: tuple[RunnerKind, ...] = ("lean", "hf") if format in ("gptq", "packed-ordered") else ("lean",)
    for kind in kinds:  # each passes its self-test, too
        found = logits_of(load_runner(tmp_path / "stored", num_slots=128, runner=kind), 1)
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


def test_groups_of_inputs_that_are_no_neighbours_keep_their_bits(tmp_path: Path) -> None:
    integer_models.write("llama", "gptq-ordered", tmp_path)
    model = load(Checkpoint(tmp_path), AutoConfig.from_pretrained(tmp_path), torch.float32)
    layers = [module for module in model.modules() if isinstance(module, StoredIntegerLinear)]
    assert len(layers) == 14
    assert all(layer.order is not None for layer in layers)
    attention = model.base_model.layers[0].self_attn
    weights = [weight_of(one) for one in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert isinstance(joined(weights, torch.float32), IntegerWeight)


def test_groups_of_unequal_sizes_are_widened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    integer_models.write("llama", "packed-ordered", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    order = tensors[f"{LAYER}.weight_g_idx"]
    order[int((order == 0).nonzero()[0])] = 1
    save_file(tensors, file, metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        load_runner(tmp_path, num_slots=128)
    assert "1 layers in" in caplog.text
    assert "their groups are not of equally many inputs" in caplog.text
    parts = {part: tensors[f"{LAYER}.{part}"] for part in ("weight_packed", "weight_scale", "weight_g_idx")}
    matrix = from_packed(parts, (48, 32))
    assert isinstance(matrix, torch.Tensor)
    numbers = torch.stack([parts["weight_packed"] >> shift & 15 for shift in range(0, 32, 4)], 2).flatten(1)
    expected = (numbers - 8) * parts["weight_scale"].float()[:, order.long()]
    assert torch.equal(matrix, expected)


@pytest.mark.parametrize(("inputs", "groups"), [(192, 2), (160, 2), (320, 3)])
def test_the_last_group_may_have_fewer_inputs(inputs: int, groups: int) -> None:
    """AutoRound packs matrices whose inputs no whole number of groups are, and no order beside them."""
    rng = np.random.default_rng(inputs)
    numbers, points = rng.integers(0, 16, (16, inputs)), rng.integers(0, 16, (16, groups))
    scales = rng.uniform(0.5, 1.5, (16, groups)).astype(np.float16)
    parts = {
        "qweight": integer_models.words(numbers, 4).T,
        "qzeros": integer_models.words(points.T, 4),
        "scales": scales.T,
    }
    tensors = {name: torch.from_numpy(part.copy()) for name, part in parts.items()}
    read = from_qweight(tensors, (16, inputs), is_symmetric=False, is_v2=True, group=128)
    assert isinstance(read, IntegerWeight)
    group_of = np.arange(inputs) // 128
    meant = (numbers - points[:, group_of]) * scales.astype(np.float32)[:, group_of]
    assert torch.equal(read.dequantized(torch.float32), torch.from_numpy(meant.astype(np.float32)))


def test_references_are_plain_models(tmp_path: Path) -> None:
    """What `bench lossless` compares with is Transformers' model on the numbers, without our layers."""
    meant = integer_models.write("llama", "awq", tmp_path)
    model = load_model(str(tmp_path), "float32")
    assert not any(isinstance(module, StoredLinear) for module in model.modules())
    for layer, matrix in meant.items():
        module = model.get_submodule(layer)
        assert isinstance(module, nn.Linear)
        assert torch.equal(module.weight.cpu(), torch.from_numpy(matrix))


def test_an_output_projection_of_its_own_is_not_taken_for_the_embedding(tmp_path: Path) -> None:
    """Whatever config.json says of the two: so does Transformers with floats."""
    integer_models.write("llama", "packed", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = 2 * tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": head}, file, metadata={"format": "pt"})
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.tie_word_embeddings
    assert torch.equal(load(Checkpoint(tmp_path), config, torch.float32).lm_head.weight, head)


LAYER = "model.layers.1.mlp.up_proj"
Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize(
    ("format", "change", "message"),
    [
        ("gptq", lambda t: t.pop(f"{LAYER}.scales"), rf"`{LAYER}.qweight` is of few bits and has no scales"),
        ("gptq-v2", lambda t: t.pop(f"{LAYER}.qzeros"), rf"`{LAYER}` in .*: `qzeros` is missing"),
        (
            "gptq",
            lambda t: t.update({f"{LAYER}.qweight": t[f"{LAYER}.qweight"][:, :40].contiguous()}),
            r"`qweight` \[4, 40\] where the model has \[48, 32\]",
        ),
        (
            "gptq",
            lambda t: t.update({f"{LAYER}.qweight": t[f"{LAYER}.qweight"][:3].contiguous()}),
            "32 numbers in 3 words: those of four and of eight bits are read, not of 3; .* without quantiz",
        ),
        (
            "gptq",
            lambda t: t.update({f"{LAYER}.scales": torch.ones(5, 48)}),
            r"scales \[48, 5\] fit no weight \[48, 32\]",
        ),
        (
            "awq",
            lambda t: t.update({f"{LAYER}.scales": torch.ones(2, 40)}),
            r"`scales` \[2, 40\] where the model has \[48, 32\]",
        ),
        (
            "awq",
            lambda t: t.update({f"{LAYER}.qweight": t[f"{LAYER}.qweight"].float()}),
            r"`qweight` is float32 \[32, 6\], no matrix of words",
        ),
        (
            "awq",
            lambda t: t.update({f"{LAYER}.qweight": torch.zeros(32, 12, dtype=torch.int32)}),
            "AWQ's weights are read with four bits, not 8",
        ),
        ("gptq", lambda t: t.update({f"{LAYER}.bias": torch.ones(48)}), "a bias too many"),
        (
            "gptq-ordered",
            lambda t: t.update({f"{LAYER}.g_idx": t[f"{LAYER}.g_idx"] + 1}),
            r"`g_idx` \[32\] names no groups of 2 for 32 inputs",
        ),
        (
            "packed-ordered",
            lambda t: t.update({f"{LAYER}.weight_g_idx": t[f"{LAYER}.weight_g_idx"][:20].contiguous()}),
            r"`g_idx` \[20\] names no groups of 2 for 32 inputs",
        ),
        (
            "packed",
            lambda t: t.update({f"{LAYER}.weight_packed": t[f"{LAYER}.weight_packed"][:40].contiguous()}),
            r"`weight_packed` is int32 \[40, 4\] where the model has \[48, 32\]",
        ),
        (
            "packed-asymmetric",
            lambda t: t.update({f"{LAYER}.weight_zero_point": torch.zeros(6, 3, dtype=torch.int32)}),
            r"zero points \[48, 3\] fit no weight \[48, 32\] in groups of 16",
        ),
        (
            "packed-asymmetric",
            lambda t: t.update({f"{LAYER}.weight_zero_point": torch.zeros(48, 2)}),
            r"`weight_zero_point` is float32 \[48, 2\] where words \[6, 2\] or int8 \[48, 2\] belong",
        ),
        (
            "gptq-asymmetric",
            lambda t: t.update({f"{LAYER}.qzeros": torch.zeros(2, 48, dtype=torch.int8)}),
            r"`qzeros` is int8 \[2, 48\] where words \[groups, 6\] belong",
        ),
        (
            "int8",
            lambda t: t.update({f"{LAYER}.weight": t[f"{LAYER}.weight"][:40].contiguous()}),
            r"\[40, 32\] where the model has \[48, 32\]",
        ),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_named(
    format: Format, change: Callable[[Tensors], object], message: str, tmp_path: Path
) -> None:
    integer_models.write("llama", format, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=message):
        load_runner(tmp_path, num_slots=128)


@pytest.mark.parametrize(
    ("format", "about", "message"),
    [
        ("awq", {"version": "gemv"}, "AWQ's packing 'gemv' is not read, only 'gemm'"),
        ("gptq", {"checkpoint_format": "marlin"}, "GPTQ's packing 'marlin' is not read"),
    ],
)
def test_other_packings_are_refused(
    format: Format, about: dict[str, str], message: str, tmp_path: Path
) -> None:
    integer_models.write("llama", format, tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= about
    file.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=message):
        load_runner(tmp_path, num_slots=128)


def described_anew(directory: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A checkpoint whose config.json says something else."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))
    return directory


def without_description(config: dict[str, Any]) -> None:
    del config["quantization_config"]


def as_compression(config: dict[str, Any]) -> None:
    config["compression_config"] = config.pop("quantization_config")


@pytest.mark.parametrize("change", [as_compression, without_description])
def test_integers_are_numbers_whatever_describes_them(
    change: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    """`compression_config` is what compressed-tensors called `quantization_config` at first."""
    integer_models.write("llama", "int8", tmp_path / "usual")
    integer_models.write("llama", "int8", tmp_path / "other")
    expected = logits_of(load_runner(tmp_path / "usual", num_slots=128), 1)
    found = logits_of(load_runner(described_anew(tmp_path / "other", change), num_slots=128), 1)
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("change", [lambda config: None, without_description])
@pytest.mark.parametrize("kind", [torch.int8, torch.uint8])
def test_integers_without_scales_are_no_weights(
    kind: torch.dtype, change: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    integer_models.write("llama", "int8", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: one for name, one in load_file(file).items() if not name.endswith("_scale")}
    tensors = {name: one.to(kind) if one.dtype == torch.int8 else one for name, one in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    told = r"`model.layers.0.mlp.down_proj.weight` is of "
    with pytest.raises(UnsupportedModel, match=told):
        load_runner(described_anew(tmp_path, change), num_slots=128)


def test_only_awqs_version_is_a_packing(tmp_path: Path) -> None:
    integer_models.write("llama", "gptq", tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["version"] = "7.7.0"  # of the tool that wrote it
    file.write_text(json.dumps(config))
    assert load_runner(tmp_path, num_slots=128).num_slots == 128


def test_one_scale_for_all() -> None:
    numbers = torch.tensor([[-128, 0], [1, 127]], dtype=torch.int8)
    weight = integers(from_int8({"weight": numbers, "weight_scale": torch.tensor(0.5)}, (2, 2)))
    assert weight.dequantized(torch.float32).tolist() == [[-64.0, 0.0], [0.5, 63.5]]


def test_scales_of_blocks_are_not_taken_for_those_of_outputs() -> None:
    """Even if there are as many."""
    tensors = {"weight": torch.ones(4, 16, dtype=torch.int8), "weight_scale": torch.rand(2, 2)}
    with pytest.raises(ValueError, match=r"\[2, 2\] fit no weight \[4, 16\]"):
        from_int8(tensors, (4, 16))
