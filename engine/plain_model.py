"""Plain Transformers models of directories: what runners are made of, and what they are compared with."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Mxfp4Config, PreTrainedModel
from transformers.utils import logging as progress

from engine.checkpoint import Checkpoint
from engine.devices import memory_of
from engine.model_config import refused
from engine.quantization import Quantization, Route
from engine.quantized_checkpoint import load, quantization_of, without_quantization
from engine.rounding import round_linears
from engine.stored_linear import StoredLinear
from engine.tensor_headers import UnreadableCheckpoint
from engine.unsupported_model import UnsupportedModel

# Of a weight that is widened on a GPU: as stored, its scale and itself in float32, what is computed in.
_BYTES_ON_THE_WAY = 12


def read_model(
    directory: Path,
    config: Any,
    dtype: torch.dtype,
    *,
    route: Route,
    quantization: Quantization | None,
    extra: dict[str, Any],
    device: torch.device,
    trust_remote_code: bool = False,
    takes_experts_apart: bool = False,
) -> PreTrainedModel:
    """The model of a directory, on the CPU unless `extra` says otherwise.

    Args:
        directory: Hugging Face model directory.
        config: its configuration.
        dtype: what is computed in.
        route: how its weights are read.
        quantization: what linear layers of floats are rounded to.
        extra: further arguments of Transformers' `from_pretrained`: sharding, or where to load to.
        device: where rounding is computed.
        trust_remote_code: run Python code that the directory names.
        takes_experts_apart: leave experts in the file, each by itself, as they are there. Transformers puts
            them together in memory, which every process of a model over ranks would have all of.

    Raises:
        UnsupportedModel: if it cannot be loaded, or not be rounded.
    """
    if quantization is not None and (extra or route != "plain"):
        raise UnsupportedModel(
            f"`quantization` cannot round the model in {directory}: "
            + ("its weights are quantized" if route != "plain" else "over ranks only the lean runner can")
        )
    if route == "quantized":
        try:
            with refused(directory):
                return load(Checkpoint(directory), config, dtype).eval()
        except UnreadableCheckpoint as error:
            raise UnsupportedModel(
                f"cannot load the model in {directory}: {error}; if its files are whole, its weights are "
                "quantized in a way that is not read (docs/gpu.md): use the checkpoint without quantization"
            ) from error
    model = None
    if route == "plain" and takes_experts_apart and not (trust_remote_code and hasattr(config, "auto_map")):
        with suppress(UnreadableCheckpoint), refused(directory):  # else as any other
            model = load(Checkpoint(directory), config, dtype).eval()
    if model is None:
        model = _read_by_transformers(directory, config, dtype, route, extra, trust_remote_code)
    if quantization is not None and not round_linears(
        model, quantization, keep=model.get_output_embeddings(), device=device
    ):
        raise UnsupportedModel(
            f"`quantization` found nothing to round in {directory}: it has no linear layers"
        )
    return model


def _read_by_transformers(
    directory: Path,
    config: Any,
    dtype: torch.dtype,
    route: Route,
    extra: dict[str, Any],
    trust_remote_code: bool,
) -> PreTrainedModel:
    if route == "plain":
        extra = {**extra, "ignore_mismatched_sizes": True}  # they are told below
        if quantization_of(config):  # of something else than weights
            extra["config"] = without_quantization(config)
    if route == "widened":
        extra = {**extra, "quantization_config": Mxfp4Config(dequantize=True)}
    model, made_up = _from_pretrained(directory, dtype, extra, trust_remote_code=trust_remote_code)
    if made_up and route in ("plain", "widened"):
        raise UnsupportedModel(
            f"the files in {directory} lack {len(made_up)} weights of {type(model).__name__} or have them in "
            f"another shape, among them {made_up[0]}: it is incomplete, or another kind of model's"
        )
    return model


def put_beside(model: PreTrainedModel, device: torch.device) -> None:
    """Put a model on a GPU, beside what lies there, as far as it fits.

    If it does not fit and has quantized weights, all but those go there if that fits: they come one by
    one when they are multiplied with (`engine.stored_linear`). Others stay where they are.
    """
    if device.type == "cpu":
        return
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    if size * 1.1 < memory_of(device).free:
        model.to(device)
        return
    layers = [module for module in model.modules() if isinstance(module, StoredLinear)]
    kept = {id(part) for layer in layers for part in layer.parameters()}
    rest = [part for part in model.parameters() if id(part) not in kept]
    size = sum(part.numel() * part.element_size() for part in rest)
    widest = max((layer.out_features * layer.in_features for layer in layers), default=0) * _BYTES_ON_THE_WAY
    if not layers or (size + widest) * 1.1 > memory_of(device).free:
        return
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, StoredLinear):
            continue
        for name, part in module.named_parameters(recurse=False):
            if id(part) not in moved:  # a tied one stays one
                moved[id(part)] = nn.Parameter(part.to(device), requires_grad=False)
            setattr(module, name, moved[id(part)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _from_pretrained(
    directory: Path, dtype: torch.dtype, extra: dict[str, Any], *, trust_remote_code: bool
) -> tuple[PreTrainedModel, list[str]]:
    """The model, and the names of its weights that Transformers made up, for it did not find them."""
    bars = progress.is_progress_bar_enabled()
    progress.disable_progress_bar()
    try:
        model: PreTrainedModel
        with refused(directory):
            model, info = AutoModelForCausalLM.from_pretrained(
                directory,
                output_loading_info=True,
                dtype=dtype,
                attn_implementation="eager",
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                **extra,
            )
    finally:
        if bars:
            progress.enable_progress_bar()
    misshapen = {name for name, *_ in info["mismatched_keys"]}
    return model.eval(), sorted({*info["missing_keys"], *misshapen})
