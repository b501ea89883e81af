"""A plan as values of the Helm chart (helm/flotilla): configuration of the cells, and the pods they need."""

from __future__ import annotations

import copy
import re
from typing import Any

from benchmarks.objectives import Slo, SloSpec
from simulator.hardware import HardwareProfile
from simulator.proposing import EAGLE
from simulator.sizing import MOST_CELLS, Load
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
# Names of models that a directory can have; profiles of shapes have a description in their place.
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
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
        ValueError: without any cell, with more than the chart takes, or as of `gpus`.
    """
    if num_cells < 1:
        raise ValueError("no number of cells attains the target, so there is nothing to install")
    of_target, of_drafters, kind = gpus(profile)
    num_pods = num_cells * max(1, of_drafters)
    if num_pods > MOST_CELLS:
        raise ValueError(
            f"{num_cells:,} cells need {num_pods:,} pods of one kind, and a release of the chart takes "
            f"{MOST_CELLS:,} at most: share the load out to several releases"
        )
    rank_gpus = 1 - _DRAFTERS_SHARE if profile.collocated and profile.drafters else 1
    placement: dict[str, Any] = {"num_cpus": 1, "num_gpus": rank_gpus}
    groups = [_group("cell", num_cells, of_target, kind)]
    if of_drafters:
        # Else Ray might put a rank of the target into a drafter's pod, and the drafter in its place.
        placement["resources"] = {"verifier": 1}
        groups[0]["rayResources"] = {"verifier": of_target}
        drafters = _group("drafter", num_pods, 1, kind)
        groups.append({**drafters, "runs": [], "rayResources": {"drafter": 1}})
    return {
        "config": {
            "target": {
                "path": _path(profile.target.partition(",")[0], "TARGET"),
                "dtype": "bfloat16",
                **({"quantization": profile.quantization} if profile.quantization else {}),
                "tensor_parallel": of_target,
                "num_slots": profile.num_slots,
                "placement": placement,
            },
            "drafters": _drafters(profile),
            "policy": system.config.policy.model_dump(mode="json", exclude_defaults=True),
            "scheduler": system.config.scheduler.model_dump(mode="json", include=_SIMULATED_BOUNDS),
            "tiers": tiers(profile, load),
            "scaling": {"cells": {"min": num_cells, "max": num_cells, "target_attainment": target}},
        },
        "models": {"source": "pvc", "pvc": {"claimName": "models"}},
        "workerGroups": groups,
    }


def _group(name: str, num_pods: int, num_gpus: int, kind: str) -> dict[str, Any]:
    """Values of a worker group of so many pods with so many GPUs each."""
    resources = {"cpu": str(_CPUS_PER_GPU * num_gpus), "memory": f"{_MEMORY_PER_GPU_GIB * num_gpus}Gi"}
    return {
        "name": name,
        "minReplicas": num_pods,
        "maxReplicas": num_pods,
        "gpu": {"count": num_gpus, "type": _PRODUCTS.get(kind, kind)},
        "resources": {"requests": dict(resources), "limits": dict(resources)},
    }


def _drafters(profile: HardwareProfile) -> list[dict[str, Any]]:
    """Those of the configuration; EAGLE's layer is in the target's process, and has no place of its own."""
    if profile.collocated and profile.drafters:
        share = round(_DRAFTERS_SHARE / len(profile.drafters), 3)
        placement: dict[str, Any] = {"num_gpus": share, "collocate": "target"}
    else:
        placement = {"num_gpus": 1, "resources": {"drafter": 1}}
    found: list[dict[str, Any]] = [
        {
            "kind": "model",
            "name": name,
            "path": _path(drafter.model, f"DRAFTER-{name}"),
            "dtype": "bfloat16",
            "placement": copy.deepcopy(placement),  # YAML would write what is shared as a reference
        }
        for name, drafter in profile.drafters.items()
    ]
    if profile.eagle is not None:
        path = _path(profile.eagle.model, "EAGLE-LAYER")
        found.append({"kind": "eagle", "name": EAGLE, "path": path, "max_depth": profile.eagle.layers})
    return found


def _path(model: str, what: str) -> str:
    """Where a model is; to be filled in where the profile is of a shape, which has no name."""
    return f"/models/{model if _MODEL.fullmatch(model) else f'NAME-OF-YOUR-{what}'}"
