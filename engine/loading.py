"""Loads a model directory into a runner, and refuses what would be silently wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from engine.decomposed_attention import AttentionKind
from engine.hf_runner import HFRunner, UnsupportedModel
from engine.llama_runner import LlamaRunner
from engine.llama_weights import load_llama_weights, why_not_lean
from engine.process import tune_process
from engine.runner import ModelRunner
from engine.self_test import check_runner
from engine.tensor_parallel import check_divisible, sharding
from engine.trusted_files import UntrustedModel, check_files
from engine.warm_up import warm_up

__all__ = ["UnsupportedModel", "load_runner"]

RunnerKind = Literal["auto", "hf", "lean"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_runner(
    path: str | Path,
    *,
    dtype: str = "float32",
    num_slots: int,
    runner: RunnerKind = "auto",
    attention: AttentionKind = "padded",
    tensor_parallel: tuple[int, int] | None = None,
    max_tokens: int | None = None,
    device: str = "cpu",
    self_test: bool = True,
    trust_remote_code: bool = False,
) -> ModelRunner:
    """Load a local Hugging Face model directory: safetensors weights, no code from it unless that is trusted.

    Sets up the process (see `engine.process.tune_process`). With tensor parallelism all ranks call this at
    the same time, after `engine.tensor_parallel.join`.

    Args:
        path: the directory.
        dtype: "float32", "bfloat16" or "float16".
        num_slots: KV slots of the runner's pool.
        runner: "lean" for the Llama family's own runner, "hf" for any other, "auto" to choose.
        attention: how keys of segments of different lengths are padded: "padded" in groups of like shape,
            "decomposed" into pieces of one length, "auto" whichever is cheaper in a forward.
        tensor_parallel: this process' rank and the number of ranks; None for a single process.
        max_tokens: longest sequence, at most the configuration's, which is the default.
        device: where the model runs.
        self_test: compare with the plain Transformers forward before returning.
        trust_remote_code: run Python code that the directory names.

    Raises:
        FileNotFoundError: if there is no model in `path`.
        UnsupportedModel: if the model cannot be loaded, or would give wrong results.
    """
    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"no model in {directory}: config.json is missing")
    if dtype not in _DTYPES:
        raise UnsupportedModel(f"dtype must be one of {', '.join(_DTYPES)}, not {dtype!r}")
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
    rank, world_size = tensor_parallel or (0, 1)
    if world_size > 1:
        check_divisible(config, world_size)
    obstacle = why_not_lean(config, max_tokens=max_tokens)
    if runner == "lean" and obstacle is not None:
        raise UnsupportedModel(f"the lean runner does not support this model: {obstacle}")
    lean = obstacle is None and runner != "hf"
    # The lean runner shards while it converts; Transformers shards while it loads.
    extra = sharding(world_size) if world_size > 1 and not lean else {}
    model = _load_model(directory, _DTYPES[dtype], extra, trust_remote_code=trust_remote_code)
    if not extra:
        model = model.to(device)
    loaded: ModelRunner
    if lean:
        group = torch.distributed.group.WORLD if world_size > 1 else None
        weights = load_llama_weights(
            model, max_tokens=max_tokens, rank=rank, world_size=world_size, group=group
        )
        loaded = LlamaRunner(weights, num_slots, attention)
    else:
        loaded = HFRunner(model, num_slots, max_tokens=max_tokens, attention=attention)
    if self_test:
        _self_test(loaded, model)
        if lean and device == "cpu":
            warm_up(loaded)
    return loaded


def _load_model(
    directory: Path, dtype: torch.dtype, extra: dict[str, Any], *, trust_remote_code: bool
) -> PreTrainedModel:
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            **extra,
        )
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModel(f"cannot load the model in {directory}: {error}") from error
    finally:
        if bars:
            logging.enable_progress_bar()
    return model.eval()


def _self_test(runner: ModelRunner, model: PreTrainedModel) -> None:
    @torch.inference_mode()
    def reference(tokens: NDArray[np.int32]) -> torch.Tensor:
        ids = torch.from_numpy(tokens.astype(np.int64))[None].to(model.device)
        if isinstance(runner, HFRunner):
            with runner.plain_attention():
                logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
        else:
            logits = model(input_ids=ids, use_cache=False).logits[0]
        return logits

    check_runner(runner, reference, model.dtype)
