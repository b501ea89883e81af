"""Running one model over several processes: the process group, and how weights are divided."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d

from engine.mixture_weights import units_of
from engine.unsupported_model import UnsupportedModel


def join(
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    *,
    device: torch.device | None = None,
    timeout_s: float = 60.0,
    loading_timeout_s: float = 1800.0,
) -> None:
    """Enter the process group of a tensor-parallel model; blocks until all ranks have.

    Ranks then load, each from its own disk: until `end_loading` collectives wait for the slowest.

    A process can be in one group at a time. The backend is NCCL if the model runs on CUDA and gloo elsewhere.

    Args:
        rank: this process' number, from 0.
        world_size: number of processes.
        master_addr: address of rank 0.
        master_port: free port there.
        device: where this rank's share of the model will be; a CPU if None. Of a GPU the index counts among
            those this process sees, as Ray sets CUDA_VISIBLE_DEVICES: with one GPU per actor it is 0.
        timeout_s: after this many seconds without the others, give up.
        loading_timeout_s: the same in collectives until `end_loading`, those that make NCCL's connections
            among them.

    Raises:
        RuntimeError: if this process is in a group already, or the others do not come.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is already in a process group; call leave() first")
    on_gpu = device is not None and device.type == "cuda"
    local = (device.index or 0) if device is not None and on_gpu else 0
    if on_gpu:
        torch.cuda.set_device(local)  # where NCCL's kernels and Transformers' shards go
    os.environ["LOCAL_RANK"] = str(local)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world_size)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = master_addr, str(master_port)
    store = TCPStore(
        master_addr, master_port, world_size, is_master=rank == 0, timeout=timedelta(seconds=timeout_s)
    )
    loading = timedelta(seconds=loading_timeout_s)
    store.set_timeout(loading)
    dist.init_process_group(
        backend="nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world_size, timeout=loading
    )


def end_loading(timeout_s: float = 60.0) -> None:
    """From now on a collective fails after so many seconds without the others: all have the model."""
    if dist.is_initialized():
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))


def leave() -> None:
    """Leave the process group, if in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def check_divisible(config: Any, world_size: int, *, is_lean: bool = False) -> None:
    """Check that a model of a Transformers configuration can be divided over `world_size` ranks.

    Args:
        config: of the model.
        world_size: number of ranks.
        is_lean: whether the lean runner divides it, and not Transformers, whose shares may be uneven.

    Raises:
        UnsupportedModel: if it cannot; Transformers itself would fail only in the first forward pass.
    """
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    for name, number in (("attention heads", heads), ("key-value heads", kv_heads)):
        if number % world_size:
            raise UnsupportedModel(
                f"{number} {name} cannot be divided over {world_size} ranks; "
                f"the number of ranks must divide {kv_heads}"
            )
    for name, size in units_of(text).items() if is_lean else ():
        if size % world_size:
            raise UnsupportedModel(
                f"{size} feed-forward units (`{name}`) cannot be divided over {world_size} ranks by the lean "
                "runner: use a number of ranks that divides them, or `runner: hf`"
            )
    if text.model_type == "cohere" and getattr(text, "use_qk_norm", False):
        # Its norms have a row of scales per head, and Transformers' plan leaves all of them on every rank.
        raise UnsupportedModel(
            f"a {text.model_type} model with `use_qk_norm` cannot be divided over {world_size} ranks by "
            "Transformers: run it on one (`tensor_parallel: 1`)"
        )


def sharding(world_size: int) -> dict[str, Any]:
    """Arguments that make `from_pretrained` load this rank's shard under the model's own plan.

    The process group must exist: Transformers then uses it instead of making one.
    """
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=world_size)}
