"""Making and ending the actors of workers, with the environment their processes start in."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import ray

# Environment of every worker: one torch thread each, and no spinning while others compute.
WORKER_ENV = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
# Has torch multiply on GPUs by cuBLASLt, which takes 4 % less of an 8B step with 64 rows on an H200, and as
# long with few. Read when torch is imported.
CUBLASLT = "TORCH_BLAS_PREFER_CUBLASLT"


def spawn(worker: type[Any], options: dict[str, Any], orphan_s: float | None = None) -> Any:
    """A new actor of a worker class, without Ray's own restarts and retries.

    Args:
        worker: its class.
        options: Ray's, that say what is reserved for it and where it runs.
        orphan_s: how long it outlives its cell, if `options` make it detached.
    """
    environment = worker_environment(options.get("num_gpus", 0.0))
    return (
        ray.remote(worker)
        .options(max_restarts=0, max_task_retries=0, runtime_env={"env_vars": environment}, **options)
        .remote(orphan_s)
    )


def worker_environment(num_gpus: float) -> dict[str, str]:
    """Environment variables of a worker that reserves so many GPUs.

    Which it sees Ray says where it reserves some; where none, Ray leaves it all of the node's, and with
    `device: auto` it would take the first, beside whoever has reserved that.
    """
    if num_gpus > 0:
        return {**WORKER_ENV, CUBLASLT: os.environ.get(CUBLASLT, "1")}
    return {**WORKER_ENV, "CUDA_VISIBLE_DEVICES": ""}


def end(actor: Any) -> None:
    """End an actor; Ray has its process killed if it does not react for five seconds."""
    with contextlib.suppress(Exception):  # dead already, or Ray itself is going
        ray.kill(actor)


def this_node() -> str:
    """Ray's id of the node this process runs on; empty while Ray is going."""
    with contextlib.suppress(Exception):
        return str(ray.get_runtime_context().get_node_id())
    return ""
