"""A plan as values of the Helm chart (helm/flotilla): configuration of the cells, and the pods they need."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.objectives import Slo, SloSpec
from simulator.hardware import HardwareProfile
from simulator.sizing import Load
from simulator.systems import System
from simulator.workloads import MIX

# What NVIDIA's device plugin calls the accelerators of the profiles (label `nvidia.com/gpu.product`).
_PRODUCTS = {
    "A100-80G": "NVIDIA-A100-SXM4-80GB",
    "H100": "NVIDIA-H100-80GB-HBM3",
    "H200": "NVIDIA-H200",
    "V100": "Tesla-V100-SXM2-32GB",
}
_HARDWARE = re.compile(r"(\d+)x (.+)")
# Of the scheduler's settings. Others a simulation leaves out (timeouts), or has other than a service may
# (a queue without end).
_SIMULATED_BOUNDS = {"batching", "max_running", "prefill_chunk", "micro_batches"}
_CPUS_PER_GPU, _MEMORY_PER_GPU_GIB = 4, 64
# Of a GPU that drafters share with the target, this is theirs together: a worker without a share sees no GPU.
_DRAFTERS_SHARE = 0.2


def gpus(profile: HardwareProfile) -> tuple[int, int, str]:
    """GPUs of a cell's target, those of its drafters beside it, and what they are.

    Raises:
        ValueError: if the profile's hardware is not `NUMBERx NAME`.
    """
    found = _HARDWARE.fullmatch(profile.hardware)
    if found is None:
        raise ValueError(
            f"profile {profile.name}: hardware `{profile.hardware}` is not NUMBERx NAME; pods are planned "
            "for accelerators only"
        )
    return int(found[1]), 0 if profile.collocated else len(profile.drafters), found[2]


def tiers(profile: HardwareProfile, load: Load) -> dict[str, dict[str, float]]:
    """A service tier for every class, with its objectives in milliseconds."""
    baseline = Slo(tpot_ms=1e3 * profile.baseline_s())
    found = {}
    for kind in load.mix or MIX:
        spec: SloSpec = load.slos.get(kind, load.slos.get("*", MIX[kind].slo))
        slo = spec.resolve(baseline)
        limits = {"tpot_ms": slo.tpot_ms, "ttft_ms": slo.ttft_ms, "e2e_ms": slo.e2e_ms}
        found[kind] = {name: round(value, 1) for name, value in limits.items() if value is not None}
    return found


def values(
    profile: HardwareProfile, load: Load, system: System, num_cells: int, target: float
) -> dict[str, Any]:
    """Values for so many cells; where models and images are, their owner must fill in.

    Cells are given the policy and the bounds that were simulated: with those of the defaults, such as fewer
    places, one would carry another load than was counted with.

    Raises:
        ValueError: without any cell, or as of `gpus`.
    """
    if num_cells < 1:
        raise ValueError("no number of cells attains the target, so there is nothing to install")
    of_target, of_drafters, kind = gpus(profile)
    model = profile.target.partition(",")[0]
    rank_gpus, placement = _placement(profile)
    per_cell = of_target + of_drafters
    resources = {"cpu": str(_CPUS_PER_GPU * per_cell), "memory": f"{_MEMORY_PER_GPU_GIB * per_cell}Gi"}
    return {
        "config": {
            "target": {
                "path": f"/models/{model}",
                "dtype": "bfloat16",
                "tensor_parallel": of_target,
                "num_slots": profile.num_slots,
                "placement": {"num_cpus": 1, "num_gpus": rank_gpus},
            },
            "drafters": [
                {
                    "kind": "model",
                    "name": name,
                    "path": f"/models/{drafter.model}",
                    "dtype": "bfloat16",
                    "placement": dict(placement),
                }
                for name, drafter in profile.drafters.items()
            ],
            "policy": system.config.policy.model_dump(mode="json", exclude_defaults=True),
            "scheduler": system.config.scheduler.model_dump(mode="json", include=_SIMULATED_BOUNDS),
            "tiers": tiers(profile, load),
            "scaling": {"cells": {"min": num_cells, "max": num_cells, "target_attainment": target}},
        },
        "models": {"source": "pvc", "pvc": {"claimName": "models"}},
        "workerGroups": [
            {
                "name": "cell",
                "minReplicas": num_cells,
                "maxReplicas": num_cells,
                "gpu": {"count": per_cell, "type": _PRODUCTS.get(kind, kind)},
                "resources": {"requests": dict(resources), "limits": dict(resources)},
            }
        ],
    }


def _placement(profile: HardwareProfile) -> tuple[float, dict[str, Any]]:
    """GPUs of a rank of the target, and the placement of every drafter."""
    if not (profile.collocated and profile.drafters):
        return 1, {"num_gpus": 1}
    share = round(_DRAFTERS_SHARE / len(profile.drafters), 3)
    return 1 - _DRAFTERS_SHARE, {"num_gpus": share, "collocate": "target"}
