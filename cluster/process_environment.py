"""Environment variables of a system's processes.

Ray starts processes with the environment of their node, which has it from whoever started that: `flotilla
serve` on one machine, the chart in its pods. Processes take it on themselves, too, for nodes that somebody
else started. Ray's `runtime_env` would start a process for each that imports Ray before it becomes the real
one: a fifth of what starting a system takes (docs/decisions/0089-no-runtime-environments.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

#: Of every process: one torch thread, because on few cores the threads of several workers fight, and two
#: arenas of glibc's allocator. By default there are eight for each core, and Ray's threads take turns in all
#: of them: each grows by itself, and what is freed in one is of no use to the others. Arenas are read when a
#: process starts, so only the environment of the node can set them.
PROCESS_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "2",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
# Has torch multiply on GPUs by cuBLASLt, which takes 4 % less of an 8B step with 64 rows on an H200, and as
# long with few. Read when torch is imported.
CUBLASLT = "TORCH_BLAS_PREFER_CUBLASLT"


def worker_environment(num_gpus: float) -> dict[str, str]:
    """Environment variables of a worker that reserves so many GPUs.

    Which it sees Ray says where it reserves some; where none, Ray leaves it all of the node's, and with
    `device: auto` it would take the first, beside whoever has reserved that.
    """
    if num_gpus > 0:
        return {**PROCESS_ENVIRONMENT, CUBLASLT: os.environ.get(CUBLASLT, "1")}
    return {**PROCESS_ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}


def take_on(environment: Mapping[str, str] = PROCESS_ENVIRONMENT) -> None:
    """Have this process run in it from now on: before it imports what reads it, as torch does."""
    os.environ.update(environment)
