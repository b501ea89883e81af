"""Loads models through Transformers, compared with its plain forward before anybody is served."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from engine.adapter_files import Adapter
from engine.checkpoint import Checkpoint
from engine.context_length import most_positions
from engine.hf_adapters import adapted
from engine.hf_runner import HFRunner
from engine.llama_runner import LlamaRunner
from engine.llama_weights import load_share, why_not_lean
from engine.mixture_check import check_mixtures
from engine.mixture_weights import expert_share, why_not_experts
from engine.model_config import read_config, refused
from engine.plain_model import put_beside, read_model
from engine.quantization import route_of
from engine.quantized_files import UnsuitableWeights
from engine.runner import ModelRunner
from engine.runner_options import RunnerOptions
from engine.self_test import check_runner
from engine.stored_linear import widen_linears, widened
from engine.stored_llama import StoredConfig, StoredLlama
from engine.tensor_headers import UnreadableCheckpoint
from engine.tensor_parallel import check_divisible, sharding
from engine.triton_support import runs_triton
from engine.unsupported_model import UnsupportedModel
from engine.warm_up import PROMPT_ROWS, warm_up

_log = logging.getLogger(__name__)


def load_through_transformers(
    directory: Path,
    device: torch.device,
    options: RunnerOptions,
    *,
    num_slots: int,
    self_test: bool,
    adapters: Sequence[Adapter] = (),
) -> tuple[LlamaRunner | HFRunner, StoredConfig | None]:
    """Load a model with weights of any kind.

    Args:
        directory: whose files were checked.
        device: where the runner is to be.
        options: how.
        num_slots: of the pool, for now.
        self_test: compare with the plain Transformers forward.
        adapters: what rows may have added to linear layers.

    Returns:
        the runner; and how its weights are read without Transformers, None where that would not do.

    Raises:
        UnsupportedModel: if the model cannot be loaded, or would give wrong results.
    """
    config = _configuration(directory, options)
    world_size = options.world_size
    with refused(directory):
        obstacle = why_not_lean(config, max_tokens=options.max_tokens) or why_not_experts(config, device)
        lean = obstacle is None and options.runner != "hf"
        if world_size > 1:
            check_divisible(config, world_size, is_lean=lean)
    try:
        route = route_of(
            directory,
            config,
            device,
            is_sharded=world_size > 1 and not lean,
            trust_remote_code=options.trust_remote_code,
        )
    except UnsuitableWeights as error:
        raise UnsupportedModel(f"cannot run the model in {directory}: {error}") from None
    if route == "transformers":
        obstacle, lean = "its quantized weights are left to Transformers", False
    if options.runner == "lean" and obstacle is not None:
        raise UnsupportedModel(f"the lean runner does not support this model: {obstacle}")
    if obstacle is not None and options.runner == "auto" and options.rank == 0:
        _log.warning(
            "%s runs through Transformers, which is slower than the lean runner (docs/gpu.md): %s",
            directory,
            obstacle,
        )
    if adapters and world_size > 1 and not lean:
        raise UnsupportedModel(
            f"over ranks only the lean runner serves adapters, and {directory} does not run by it: set "
            "tensor_parallel to 1"
        )
    # The lean runner shards while it converts; Transformers shards while it loads.
    extra = sharding(world_size) if world_size > 1 and not lean else {}
    if route == "widened" and options.rank == 0:
        _log.warning(
            "the MXFP4 weights in %s are widened to %s: in bfloat16 they take nearly four times the memory",
            directory,
            options.dtype,
        )
    if route == "transformers" and not extra:
        extra = {"device_map": {"": device}}  # its kernels' weights must be made where they run
    model = read_model(
        directory,
        config,
        options.torch_dtype,
        route=route,
        quantization=options.quantization,
        extra=extra,
        device=device,
        trust_remote_code=options.trust_remote_code,
        takes_experts_apart=lean and expert_share(config) > 0.0,
    )
    is_quantized = route == "quantized" or options.quantization is not None
    if is_quantized and not runs_triton(device):
        _log.warning(
            "quantized weights are widened to %s on %s, where no kernel takes them: they save neither memory "
            "nor time",
            options.dtype,
            device,
        )
        if not lean:
            widen_linears(model, options.torch_dtype)
    loaded: LlamaRunner | HFRunner
    stored = None
    with refused(directory):
        if lean:
            source: PreTrainedModel | StoredLlama = model
            # Of experts, files and Transformers' modules have other names.
            is_plain = not is_quantized and not expert_share(config)
            checkpoint = None
            if is_plain:
                # What an index names beside the model's own, Transformers passes over.
                with suppress(UnreadableCheckpoint):
                    checkpoint = Checkpoint(directory)
            if checkpoint is not None and StoredLlama.is_readable(checkpoint, model):
                # As it will be read when it is known to pass: what is compared is what will serve then.
                stored = StoredConfig.of(model)
                stays = device.type == "cpu"
                source = StoredLlama(checkpoint, stored, options.torch_dtype, stays=stays)
            weights = load_share(source, device, options, adapters)
            loaded = LlamaRunner(weights, num_slots, options.attention)
        else:
            loaded = HFRunner(
                model if extra else model.to(device),
                num_slots,
                max_tokens=options.max_tokens,
                attention=options.attention,
                adapters=adapters,
            )
    loaded.keep_features(options.feature_layers)
    if self_test:
        if lean:
            put_beside(model, device)
        _self_test(loaded, model, directory, adapters)
        if is_quantized and runs_triton(device):
            warm_up(loaded, PROMPT_ROWS)
    return loaded, stored


def _configuration(directory: Path, options: RunnerOptions) -> Any:
    config = read_config(directory, trust_remote_code=options.trust_remote_code)
    with refused(directory):
        longest = most_positions(config.get_text_config())
    if options.max_tokens is not None and longest is not None and options.max_tokens > longest:
        raise UnsupportedModel(
            f"max_model_len {options.max_tokens} is more than the model in {directory} takes: {longest}"
        )
    return config


def _self_test(
    runner: ModelRunner, model: PreTrainedModel, directory: Path, adapters: Sequence[Adapter]
) -> None:
    # Where it does not fit beside the runner, its layers stay on the host and the rest is on the GPU.
    device = model.get_input_embeddings().weight.device

    @torch.inference_mode()
    def reference(
        sequences: Sequence[NDArray[np.int32]], adapter: Adapter | None = None
    ) -> list[torch.Tensor]:
        ids = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.int64, device=device)
        for row, tokens in zip(ids, sequences, strict=True):  # padded behind, where no token sees it
            row[: len(tokens)] = torch.from_numpy(tokens.astype(np.int64)).to(device)
        own = runner.plain_attention() if isinstance(runner, HFRunner) else nullcontext()
        with widened(model), own, nullcontext() if adapter is None else adapted(model, adapter):
            logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
        return [rows[: len(tokens)] for rows, tokens in zip(logits, sequences, strict=True)]

    with refused(directory):
        check_runner(runner, reference, model.dtype, model.named_parameters())
        if isinstance(runner, LlamaRunner):
            with widened(model):
                check_mixtures(runner.weights, model)
        for number, adapter in enumerate(adapters, 1):
            check_runner(runner, partial(reference, adapter=adapter), model.dtype, adapter=number)
