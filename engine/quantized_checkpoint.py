"""Reads checkpoints with quantized weights into Transformers models.

Transformers' own layers for them fetch kernels from the hub at the first forward, or need packages that build
them; those for FP8 need a GPU of compute capability 8.9, and round rows to eight bits, too.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Collection
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from engine.checkpoint import Checkpoint
from engine.fp8 import BLOCK
from engine.fp8_module import StoredFp8Linear
from engine.integer_formats import from_int8, from_packed, from_qweight
from engine.integer_module import StoredIntegerLinear
from engine.quantized_files import DESCRIBED_IN, description_in
from engine.renaming import renaming_of
from engine.separated_experts import are_separate, separate
from engine.stored_layers import StoredLayer, stored_layers, why_not_stored
from engine.stored_linear import StoredLinear, plain_linear
from engine.tensor_headers import UnreadableCheckpoint

_log = logging.getLogger(__name__)

# Scales of what is not quantized here (rows, keys and values), and what models make themselves.
_UNUSED = re.compile(
    r"\.((input|output|[qkv])_(scale|zero_point)|activation_scale|input_scale_ub|kv_scale|prob_output_scale"
    r"|rotary_emb\.inv_freq)$"
)
_AUTO_ROUND = ("auto-round", "intel/auto-round")
_GPTQ_PACKINGS = frozenset({"gptq", "auto_gptq"})
# Rows and columns that share an exponent in the MX formats of the Open Compute Project.
_MX_BLOCK = (1, 32)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def why_not_read(checkpoint: Checkpoint, config: Any, *, trust_remote_code: bool = False) -> str | None:
    """What keeps `load` from reading a quantized checkpoint; None if nothing that its names show."""
    if (why := why_not_stored(checkpoint, quantization_of(config))) is not None:
        return why
    if trust_remote_code and getattr(config, "auto_map", None):
        return "its code comes with it"
    try:
        model = _skeleton(config, torch.bfloat16, "eager", _modules(checkpoint))
    except (ValueError, KeyError, ImportError, TypeError, AttributeError) as error:
        return f"Transformers cannot build it: {error}"
    try:
        checkpoint = checkpoint.renamed(renaming_of(model))
    except UnreadableCheckpoint as error:
        return str(error)
    layers = stored_layers(checkpoint)
    modules = dict(model.named_modules())
    known = set(model.state_dict())
    for module in layers.keys() & modules.keys():
        known |= {*layers[module].tensors, f"{module}.bias"}  # which some tools add where there is none
    unknown = sorted(_used(checkpoint, model) - known)
    expert = next((name for name in unknown if "experts" in name.split(".")), None)
    if expert is not None and expert.rpartition(".")[0] in layers:
        return f"its experts are quantized (`{expert}`), and those of {type(model).__name__} are not read so"
    if unknown:
        return f"`{unknown[0]}` is no tensor of the model that Transformers builds"
    linear = {name for name, module in modules.items() if type(module) is nn.Linear}
    other = sorted(set(layers) - linear)
    if other:
        return f"`{other[0]}` has quantized weights and is no linear layer"
    if getattr(config, "tie_word_embeddings", False):
        head = model.get_output_embeddings()
        if any(model.get_submodule(name) is head for name in layers):
            return "its output projection is quantized and tied to the embedding"
    return None


def block_of(config: Any) -> tuple[int, int]:
    """Rows and columns that share a scale, by a Transformers configuration, if its scales are per block."""
    described = quantization_of(config)
    block: Any = described.get("weight_block_size")
    for group in (described.get("config_groups") or {}).values():  # compressed-tensors
        weights = group.get("weights") or {}
        if block is None and weights.get("block_structure"):
            block = weights["block_structure"]
        if block is None and weights.get("strategy") == "group":
            block = (1, weights["group_size"])
    if isinstance(block, str):
        block = block.lower().split("x")
    return (int(block[0]), int(block[1])) if block else (BLOCK, BLOCK)


def load(
    checkpoint: Checkpoint, config: Any, dtype: torch.dtype, attention: str = "eager"
) -> PreTrainedModel:
    """The model of a checkpoint, on the CPU: quantized weights as they are, the others in `dtype`.

    Args:
        checkpoint: one for which `why_not_read` is None.
        config: its Transformers configuration.
        dtype: of what is not quantized, and of what is computed.
        attention: implementation in Transformers.

    Raises:
        UnreadableCheckpoint: if a tensor is missing, or has another shape or type.
    """
    model = _skeleton(config, dtype, attention, _modules(checkpoint))
    checkpoint = checkpoint.renamed(renaming_of(model))
    layers, directory = stored_layers(checkpoint), checkpoint.directory
    rest = _used(checkpoint, model)
    widened = 0
    for module, layer in layers.items():
        bias = f"{module}.bias"
        rest -= {*layer.tensors, bias}
        try:
            place = model.get_submodule(module)
            found = checkpoint.read(bias).to(dtype) if bias in checkpoint.names else None
            if found is not None and place.bias is None and not found.any():
                found = None
            read = _read(layer, checkpoint, config, (place.out_features, place.in_features), found, dtype)
            widened += not isinstance(read, StoredLinear)
            _put(model, module, read)
        except ValueError as error:
            raise UnreadableCheckpoint(f"`{module}` in {directory}: {error}") from None
    if widened:
        _log.warning(
            "%d layers in %s are widened to %s, for their groups are not of equally many inputs: those save "
            "neither memory nor time",
            widened,
            directory,
            str(dtype).removeprefix("torch."),
        )
    exact = model._keep_in_fp32_modules_strict or ()  # of routers, say
    tensors = {name: checkpoint.read(name) for name in rest}
    tensors = {
        name: one.to(torch.float32 if any(part in name for part in exact) else dtype)
        if one.dtype in _FLOATS
        else one
        for name, one in tensors.items()
    }
    try:
        missing = model.load_state_dict(tensors, strict=False, assign=True).missing_keys
    except RuntimeError as error:
        raise UnreadableCheckpoint(f"{directory}: {error}") from None
    # As Transformers: an output projection that is stored, too, and is another matrix is not the embedding.
    model.tie_weights(missing_keys=set(missing), recompute_mapping=False)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    lacking = [name for name in missing if name not in parameters or parameters[name].is_meta]
    lacking = [name for name in lacking if not _matches(model._keys_to_ignore_on_load_missing, name)]
    if lacking:
        raise UnreadableCheckpoint(f"`{lacking[0]}` is missing in {directory}")
    settings = directory / "generation_config.json"
    if settings.is_file() and model.can_generate():
        model.generation_config = type(model.generation_config).from_pretrained(directory)
    return model


def _used(checkpoint: Checkpoint, model: PreTrainedModel) -> set[str]:
    """Names of the tensors that are read."""
    ignored = model._keys_to_ignore_on_load_unexpected
    return {name for name in checkpoint.names if not _UNUSED.search(name) and not _matches(ignored, name)}


def _matches(patterns: Any, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def without_quantization(config: Any) -> Any:
    """A Transformers configuration that says nothing of quantized weights."""
    plain = copy.deepcopy(config)
    for field in DESCRIBED_IN:
        if hasattr(plain, field):
            delattr(plain, field)
    return plain


def _modules(checkpoint: Checkpoint) -> set[str]:
    """Names of the modules that have tensors of their own."""
    return {name.rpartition(".")[0] for name in checkpoint.names}


def _skeleton(config: Any, dtype: torch.dtype, attention: str, modules: Collection[str]) -> PreTrainedModel:
    """The model without its weights; the buffers it makes itself are there.

    Experts have layers of their own where some of the checkpoint's `modules`, by their names, are such.
    """
    plain = without_quantization(config)
    # Random numbers for weights that are not there take most of the time; buffers need what is done to them.
    with init_empty_weights(), no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            plain, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    for weight in model.parameters():
        vars(weight)["_is_hf_initialized"] = True
    model.init_weights()
    if are_separate(modules):
        separate(model, modules)
    return model


def quantization_of(config: Any) -> dict[str, Any]:
    """How a Transformers configuration says that the weights are quantized; empty if it does not."""
    described = description_in(vars(config)) or {}
    found: dict[str, Any] = described if isinstance(described, dict) else described.to_dict()
    return found


def _read(
    layer: StoredLayer,
    checkpoint: Checkpoint,
    config: Any,
    shape: tuple[int, int],
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> nn.Module:
    """The layer, of `shape`; of floats if its groups are not of equally many inputs.

    Raises:
        ValueError: if its tensors do not belong together, or have another shape.
    """
    tensors = {
        part: checkpoint.read(f"{layer.module}.{part}")
        for part in (layer.numbers, layer.scales, *layer.beside)
    }
    described = quantization_of(config)
    size = described.get("group_size")
    if layer.layout == "fp8":
        numbers, scales = tensors[layer.numbers], tensors[layer.scales]
        block = _MX_BLOCK if _is_mx(numbers, scales) else block_of(config)
        return StoredFp8Linear(numbers, _scales(scales, described, is_mx=block == _MX_BLOCK), bias, block)
    if layer.layout == "int8":
        weight = from_int8(tensors, shape)
    elif layer.layout == "packed":
        weight = from_packed(tensors, shape)
    else:
        weight = from_qweight(
            tensors,
            shape,
            is_symmetric=bool(described.get("sym")),
            is_v2=_is_v2(described),
            group=size if isinstance(size, int) else None,
        )
    if isinstance(weight, torch.Tensor):
        return plain_linear(weight.to(dtype), bias)
    return StoredIntegerLinear(weight, bias)


def _is_v2(described: dict[str, Any]) -> bool:
    """Whether GPTQ's zero points are what they are, not one less."""
    method = str(described.get("quant_method")).lower()
    if method in _AUTO_ROUND:
        # Its own packing has them so, and what it calls `gptqmodel`; else it packs as GPTQ's first version.
        packing = str(described.get("packing_format") or described.get("backend")).lower()
        return _GPTQ_PACKINGS.isdisjoint(packing.split(":"))
    # GPTQModel has named it by both fields.
    return "gptq_v2" in (described.get("checkpoint_format"), described.get("format"))


def _is_mx(numbers: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether these are MXFP8: with a byte for each output's blocks, as no other format has them."""
    rows, columns = _MX_BLOCK
    blocks = (numbers.shape[0] // rows, -(-numbers.shape[-1] // columns))
    return scales.dtype == torch.uint8 and tuple(scales.shape) == blocks


def _scales(tensor: torch.Tensor, described: dict[str, Any], *, is_mx: bool) -> torch.Tensor:
    """Scales as what they are, where bytes stand for exponents."""
    if tensor.dtype == torch.uint8 and (is_mx or described.get("scale_fmt") == "ue8m0"):
        return tensor.view(torch.float8_e8m0fnu)
    return tensor


def _put(model: nn.Module, name: str, layer: Any) -> None:
    """Put a layer in the place of the one of that name.

    Raises:
        ValueError: if it has another shape.
    """
    parent, _, own = name.rpartition(".")
    place = model.get_submodule(parent)
    before = getattr(place, own)
    shape, expected = ([one.out_features, one.in_features] for one in (layer, before))
    if shape != expected:
        raise ValueError(f"{shape} where the model has {expected}")
    if (before.bias is None) != (layer.bias is None):
        raise ValueError("a bias is missing" if layer.bias is None else "a bias too many")
    setattr(place, own, layer)
