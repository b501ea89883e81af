"""Loads a model directory into a runner, and refuses what would be silently wrong."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.adapter_files import Adapter, read_adapter
from engine.attention_kinds import AttentionKind
from engine.capturable import CapturableRunner
from engine.checkpoint import Checkpoint
from engine.cuda_graphs import GraphedRunner
from engine.devices import DeviceUnavailable, memory_of, resolve_device
from engine.eagle_config import is_eagle
from engine.gpu_sharing import why_by_turns
from engine.hf_capturing import why_not_captured
from engine.kv_budget import CPU_SLOTS, NOTHING_BESIDE, Beside, KVBudget, NotEnoughMemory, NumSlots
from engine.llama_runner import LlamaRunner
from engine.llama_weights import load_share
from engine.model_files import BrokenFiles, check_model_files
from engine.process import tune_process
from engine.runner import ModelRunner
from engine.runner_options import DTYPES, RunnerKind, RunnerOptions
from engine.self_test_record import SelfTestRecord
from engine.stored_llama import StoredConfig, StoredLlama
from engine.tiled_product import UnsuitableBlocks
from engine.trusted_files import UntrustedModel, check_files
from engine.unsupported_model import UnsupportedModel
from engine.warm_up import capture, warm_up

if TYPE_CHECKING:
    from engine.hf_runner import HFRunner
    from engine.quantization import Quantization

__all__ = ["DeviceUnavailable", "NotEnoughMemory", "RunnerKind", "UnsupportedModel", "load_runner"]

_log = logging.getLogger(__name__)

# Slots for the self-test where the pool is sized after it, when the reference's memory is free again.
_TEST_SLOTS = 1088


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
    adapters: Sequence[tuple[str, Path]] = (),
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
        max_tokens: longest sequence (`max_model_len`), by default the configuration's, and at most that or
            what its rotary scaling makes of it.
        device: where the model runs: see `engine.devices.resolve_device`.
        memory_fraction, device_share: see `engine.kv_budget.KVBudget`; what "auto" goes by.
        graphs: replay captured forwards on a GPU (see `engine.cuda_graphs`), if they can be.
        quantization: what weights of linear layers are rounded to while it loads, of a checkpoint of floats;
            what the model computes then is the model.
        self_test: compare with the plain Transformers forward before returning, unless the same passed here
            before (see `engine.self_test_record`).
        trust_remote_code: run Python code that the directory names.
        feature_layers: layers whose inputs are kept (see `engine.eagle.FeatureRunner`).
        adapters: names and directories of the LoRA adapters that segments have, numbered from 1.
        beside: what is to be loaded on the device later.

    Raises:
        FileNotFoundError: if there is no model in `path`.
        UnsupportedModel: if the model or an adapter cannot be loaded, or would give wrong results.
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
    if dtype not in DTYPES:
        raise UnsupportedModel(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    where = resolve_device(device)
    try:
        check_files(directory, trust_remote_code=trust_remote_code)
        check_model_files(directory)
    except (UntrustedModel, BrokenFiles) as error:
        raise UnsupportedModel(str(error)) from None
    tune_process()
    rank, world_size = tensor_parallel or (0, 1)
    options = RunnerOptions(
        dtype=dtype,
        num_slots=num_slots,
        runner=runner,
        attention=attention,
        rank=rank,
        world_size=world_size,
        max_tokens=max_tokens,
        quantization=quantization,
        trust_remote_code=trust_remote_code,
        feature_layers=tuple(feature_layers),
        adapters=tuple((name, str(path.resolve())) for name, path in adapters),
    )
    low_ranks = [read_adapter(name, path) for name, path in adapters]
    first_slots = CPU_SLOTS if num_slots == "auto" else num_slots
    if where.type != "cpu":
        first_slots = min(first_slots, _TEST_SLOTS)
    record = SelfTestRecord(directory, where, options) if self_test else None
    stored = None if record is None else _recalled(record, where, world_size)
    loaded: LlamaRunner | HFRunner
    try:
        if stored is not None:
            _log.info("%s passed its self-test here before, and nothing has changed since", directory)
            loaded = _load_stored(directory, where, options, stored, first_slots, low_ranks)
        else:
            from engine.transformers_loading import load_through_transformers

            loaded, stored = load_through_transformers(
                directory,
                where,
                options,
                num_slots=first_slots,
                self_test=self_test,
                adapters=low_ranks,
            )
            if record is not None and stored is not None:
                record.keep(stored)
        if self_test and isinstance(loaded, LlamaRunner):
            warm_up(loaded)
        if isinstance(loaded, LlamaRunner):
            loaded.attention.prepare(0, loaded.heads, loaded.late_norm)
        if where.type != "cpu":
            if device_share < 1 and (by_turns := why_by_turns()) is not None:
                _log.warning(by_turns)
            torch.cuda.empty_cache()
            budget = KVBudget(str(where), memory_of(where), memory_fraction, device_share, beside)
            slots = _fitting(num_slots, budget, loaded.shape.kv_bytes_per_token, where, world_size)
            if graphs and isinstance(loaded, LlamaRunner):
                loaded.resize(slots + 1)
                captured = GraphedRunner(loaded)
                capture(captured, is_alone=world_size == 1)
                return captured
            if graphs and (found := _captured_if_possible(loaded, slots, directory)) is not None:
                return found
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
    except RuntimeError as error:  # torch has no class of its own for the host's memory
        if "can't allocate memory" not in str(error):
            raise
        size = sum(file.stat().st_size for file in directory.glob("*.safetensors")) / (1 << 30)
        told = str(error).splitlines()[-1]
        raise NotEnoughMemory(
            f"the model in {directory} ({size:.1f} GiB of weights) with {first_slots} KV slots does not fit "
            f"into this machine's memory: lower num_slots, or use a smaller dtype or model ({told})"
        ) from error
    return loaded


def _captured_if_possible(runner: CapturableRunner, slots: int, directory: Path) -> GraphedRunner | None:
    """A Transformers model with captured forwards; None, and a line in the log, where it cannot have them."""
    obstacle = why_not_captured(runner)
    if obstacle is None:
        runner.resize(slots + 1)
        captured = GraphedRunner(runner)
        try:
            capture(captured)
            return captured
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            obstacle = str(error).splitlines()[0]
    _log.warning("forwards of %s are not captured: %s", directory, obstacle)
    return None


def _load_stored(
    directory: Path,
    device: torch.device,
    options: RunnerOptions,
    config: StoredConfig,
    num_slots: int,
    adapters: Sequence[Adapter],
) -> LlamaRunner:
    """A runner on what the files hold, without Transformers."""
    stays = device.type == "cpu"
    source = StoredLlama(Checkpoint(directory), config, options.torch_dtype, stays=stays)
    weights = load_share(source, device, options, adapters)
    runner = LlamaRunner(weights, num_slots, options.attention)
    runner.keep_features(options.feature_layers)
    return runner


def _recalled(record: SelfTestRecord, device: torch.device, world_size: int) -> StoredConfig | None:
    """What is on record, if it is on every rank's: all must run the same forwards, in the self-test, too."""
    stored = record.recall()
    if world_size > 1 and torch.distributed.is_initialized():
        known = torch.tensor([int(stored is not None)], device=device)
        torch.distributed.all_reduce(known, torch.distributed.ReduceOp.MIN)
        return stored if known.item() else None
    return stored


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
