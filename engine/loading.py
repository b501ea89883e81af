"""Loads a model directory into a runner, and refuses what would be silently wrong."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, PreTrainedModel

from engine.attention_kinds import AttentionKind
from engine.cuda_graphs import GraphedRunner
from engine.devices import DeviceUnavailable, memory_of, resolve_device
from engine.eagle_config import is_eagle
from engine.fp8_linear import UnsuitableBlocks
from engine.fp8_module import widen_linears, widened
from engine.gpu_sharing import why_by_turns
from engine.hf_runner import HFRunner, UnsupportedModel
from engine.kv_budget import CPU_SLOTS, NOTHING_BESIDE, Beside, KVBudget, NotEnoughMemory, NumSlots
from engine.llama_runner import LlamaRunner
from engine.llama_weights import load_llama_weights, why_not_lean
from engine.plain_model import put_beside, read_model
from engine.process import tune_process
from engine.quantization import Quantization, UnsuitableWeights, route_of
from engine.runner import ModelRunner
from engine.self_test import check_runner
from engine.tensor_parallel import check_divisible, sharding
from engine.triton_support import runs_triton
from engine.trusted_files import UntrustedModel, check_files
from engine.warm_up import PROMPT_ROWS, capture, warm_up

__all__ = ["DeviceUnavailable", "NotEnoughMemory", "UnsupportedModel", "load_runner"]

_log = logging.getLogger(__name__)

# Slots for the self-test where the pool is sized after it, when the reference's memory is free again.
_TEST_SLOTS = 512

RunnerKind = Literal["auto", "hf", "lean"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_runner(
    path: str | Path,
    *,
    dtype: str = "float32",
    num_slots: NumSlots,
    runner: RunnerKind = "auto",
    attention: AttentionKind | None = None,
    tensor_parallel: tuple[int, int] | None = None,
    max_tokens: int | None = None,
    device: str | torch.device = "cpu",
    memory_fraction: float = 0.9,
    device_share: float = 1.0,
    graphs: bool = True,
    quantization: Quantization | None = None,
    self_test: bool = True,
    trust_remote_code: bool = False,
    feature_layers: Sequence[int] = (),
    beside: Beside = NOTHING_BESIDE,
) -> ModelRunner:
    """Load a local Hugging Face model directory: safetensors weights, no code from it unless that is trusted.

    Sets up the process (see `engine.process.tune_process`). With tensor parallelism all ranks call this at
    the same time, after `engine.tensor_parallel.join`.

    Args:
        path: the directory.
        dtype: "float32", "bfloat16" or "float16".
        num_slots: KV slots of the runner's pool; "auto" for as many as fit on a GPU.
        runner: "lean" for the Llama family's own runner, "hf" for any other, "auto" to choose.
        attention: how keys of segments of different lengths are attended to: see `engine.attention_kinds`.
        tensor_parallel: this process' rank and the number of ranks; None for a single process.
        max_tokens: longest sequence, at most the configuration's, which is the default (`max_model_len`).
        device: where the model runs: see `engine.devices.resolve_device`.
        memory_fraction, device_share: see `engine.kv_budget.KVBudget`; what "auto" goes by.
        graphs: replay captured forwards on a GPU (see `engine.cuda_graphs`); the lean runner only.
        quantization: "fp8" rounds weights of linear layers to eight bits while it loads, of a checkpoint of
            floats; what the model computes then is the model.
        self_test: compare with the plain Transformers forward before returning.
        trust_remote_code: run Python code that the directory names.
        feature_layers: layers whose inputs are kept (see `engine.eagle.FeatureRunner`).
        beside: what is to be loaded on the device later.

    Raises:
        FileNotFoundError: if there is no model in `path`.
        UnsupportedModel: if the model cannot be loaded, or would give wrong results.
        DeviceUnavailable: if there is no such device.
        NotEnoughMemory: if the weights or the pool do not fit on it.
    """
    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"no model in {directory}: config.json is missing")
    if is_eagle(directory):  # Transformers would take it for a Llama, whose weights it makes up
        raise UnsupportedModel(
            f"{directory} holds an EAGLE-3 drafter, which is no model by itself: use it with `kind: eagle`, "
            "beside the target it was made for"
        )
    if dtype not in _DTYPES:
        raise UnsupportedModel(f"dtype must be one of {', '.join(_DTYPES)}, not {dtype!r}")
    where = resolve_device(device)
    try:
        check_files(directory, trust_remote_code=trust_remote_code)
    except UntrustedModel as error:
        raise UnsupportedModel(str(error)) from None
    tune_process()
    try:
        config = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(f"cannot read the configuration in {directory}: {error}") from error
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if max_tokens is not None and longest is not None and max_tokens > longest:
        raise UnsupportedModel(
            f"max_model_len {max_tokens} is more than the model in {directory} takes: {longest}"
        )
    rank, world_size = tensor_parallel or (0, 1)
    if world_size > 1:
        check_divisible(config, world_size)
    obstacle = why_not_lean(config, max_tokens=max_tokens)
    lean = obstacle is None and runner != "hf"
    try:
        route = route_of(
            directory,
            config,
            where,
            is_sharded=world_size > 1 and not lean,
            trust_remote_code=trust_remote_code,
        )
    except UnsuitableWeights as error:
        raise UnsupportedModel(f"cannot run the model in {directory}: {error}") from None
    if route == "transformers":
        obstacle, lean = "its quantized weights are left to Transformers", False
    if runner == "lean" and obstacle is not None:
        raise UnsupportedModel(f"the lean runner does not support this model: {obstacle}")
    # The lean runner shards while it converts; Transformers shards while it loads.
    extra = sharding(world_size) if world_size > 1 and not lean else {}
    if route == "transformers" and not extra:
        extra = {"device_map": {"": where}}  # its kernels' weights must be made where they run
    on_host = where.type == "cpu"
    first_slots = CPU_SLOTS if num_slots == "auto" else num_slots
    loaded: LlamaRunner | HFRunner
    try:
        model = read_model(
            directory,
            config,
            _DTYPES[dtype],
            route=route,
            quantization=quantization,
            extra=extra,
            device=where,
            trust_remote_code=trust_remote_code,
        )
        has_kernels = runs_triton(where)
        if (route == "fp8" or quantization is not None) and not has_kernels:
            _log.warning(
                "weights of eight bits are widened to %s on %s, where no kernel takes them: they save "
                "neither memory nor time",
                dtype,
                where,
            )
            if not lean:
                widen_linears(model, _DTYPES[dtype])
        first_slots = first_slots if on_host else min(first_slots, _TEST_SLOTS)
        if lean:
            group = torch.distributed.group.WORLD if world_size > 1 else None
            weights = load_llama_weights(
                model,
                max_tokens=max_tokens,
                rank=rank,
                world_size=world_size,
                group=group,
                device=where,
            )
            loaded = LlamaRunner(weights, first_slots, attention)
        else:
            loaded = HFRunner(
                model if extra else model.to(where), first_slots, max_tokens=max_tokens, attention=attention
            )
        loaded.keep_features(feature_layers)
        if self_test:
            if lean:
                put_beside(model, where)
            _self_test(loaded, model)
            if isinstance(loaded, LlamaRunner):
                warm_up(loaded)
            if has_kernels and (route == "fp8" or quantization is not None):
                warm_up(loaded, PROMPT_ROWS)
        if isinstance(loaded, LlamaRunner):
            loaded.attention.prepare(0, loaded.heads)
        del model
        if not on_host:
            if device_share < 1 and (obstacle := why_by_turns()) is not None:
                _log.warning(obstacle)
            torch.cuda.empty_cache()
            budget = KVBudget(str(where), memory_of(where), memory_fraction, device_share, beside)
            slots = _fitting(num_slots, budget, loaded.shape.kv_bytes_per_token, where, world_size)
            if graphs and isinstance(loaded, LlamaRunner):
                loaded.resize(slots + 1)
                captured = GraphedRunner(loaded)
                capture(captured, is_alone=world_size == 1)
                return captured
            loaded.resize(slots)
    except UnsuitableBlocks as error:
        raise UnsupportedModel(f"cannot lay out the model in {directory}: {error}") from None
    except torch.cuda.OutOfMemoryError as error:
        size = sum(file.stat().st_size for file in directory.glob("*.safetensors")) / (1 << 30)
        raise NotEnoughMemory(
            f"the model in {directory} ({size:.1f} GiB of weights, {world_size} rank(s)) does not fit on "
            f"{where}, of which {memory_of(where).free / (1 << 30):.1f} GiB are free: use a smaller dtype, "
            f"more ranks or another device ({str(error).splitlines()[0]})"
        ) from error
    return loaded


def _fitting(
    num_slots: NumSlots, budget: KVBudget, slot_bytes: int, device: torch.device, world_size: int
) -> int:
    """How many slots the pool gets: what was asked for, checked, or what fits on every rank."""
    if num_slots != "auto":
        budget.check(num_slots, slot_bytes)
        return num_slots
    slots = budget.slots(slot_bytes)
    if world_size > 1:  # ranks decide alike only if their pools are alike
        least = torch.tensor([slots], device=device)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
        slots = int(least.item())
    return slots


def _self_test(runner: ModelRunner, model: PreTrainedModel) -> None:
    # Where it does not fit beside the runner, its layers stay on the host and the rest is on the GPU.
    device = model.get_input_embeddings().weight.device

    @torch.inference_mode()
    def reference(sequences: Sequence[NDArray[np.int32]]) -> list[torch.Tensor]:
        ids = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.int64, device=device)
        for row, tokens in zip(ids, sequences, strict=True):  # padded behind, where no token sees it
            row[: len(tokens)] = torch.from_numpy(tokens.astype(np.int64)).to(device)
        with widened(model), runner.plain_attention() if isinstance(runner, HFRunner) else nullcontext():
            logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
        return [rows[: len(tokens)] for rows, tokens in zip(logits, sequences, strict=True)]

    check_runner(runner, reference, model.dtype)
