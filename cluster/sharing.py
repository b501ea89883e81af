"""Which drafters of a cell draft on the same processors, from where they are placed. No Ray."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping

from cluster.config import FlotillaConfig
from cluster.placement import PlacementError, Plan, instance_names, plan_cell
from cluster.placement_config import PlacementConfig
from selector.sharing import Sharing

#: The group of drafters on processor cores that nobody reserved, and of kinds added while the cell serves.
SHARED_CORES = ""
# Reserved shares of a device are sums of decimal fractions.
ROUNDING = 1e-6


def processor_groups(plan: Plan, instances: Mapping[str, PlacementConfig]) -> dict[str, str]:
    """By instance, the name of the processors it drafts on; who has the same name waits for the other.

    Whole GPUs, CPUs that Ray reserves and a node of its own belong to one instance. Those with a share of a
    GPU are taken to be on as few GPUs as hold all shares, for Ray does not say before it has placed them.
    Without any of these a drafter uses the cores of its node that nobody reserved: of its bundle's, if that
    is known to be on another node than the target's, else of the target's.

    Args:
        plan: of the cell (`cluster.placement.plan_cell`).
        instances: where each drafter's instances are placed.
    """
    groups = {}
    for name, placement in instances.items():
        index = plan.seat_of(name)
        bundle = None if index is None else plan.bundles[index]
        is_elsewhere = bundle is not None and not any(seat not in instances for seat in bundle.seats)
        if placement.num_gpus >= 1:
            groups[name] = f"GPUs of {name}"
        elif placement.num_gpus > 0:
            groups[name] = "shares of GPUs" if is_elsewhere else "shares of the target's GPU"
        elif is_elsewhere and plan.strategy == "STRICT_SPREAD":
            groups[name] = f"node of bundle {index}"
        elif placement.num_cpus >= 1:
            groups[name] = f"CPUs of {name}"
        elif is_elsewhere and placement.labels:
            labels = ", ".join(f"{label}={value}" for label, value in sorted(placement.labels.items()))
            groups[name] = f"nodes with {labels}"
        else:
            groups[name] = SHARED_CORES
    return groups


def drafters_elsewhere(config: FlotillaConfig) -> int:
    """How many drafters compute at the same time on processors other than the target's cores."""
    _, _, at_once = _groups(config)
    return sum(count for group, count in at_once.items() if not _is_on_cores(group))


def sharing_of(config: FlotillaConfig) -> Sharing:
    """Groups of the configured kinds that share processors, with `scheduler.draft_ahead` settled.

    A kind whose instances are in several groups is in that of the first: its instances draft as one.
    """
    instances, groups, at_once = _groups(config)
    apart = sum(count for group, count in at_once.items() if group != SHARED_CORES)
    at_once[SHARED_CORES] = max(1, (config.scheduler.draft_ahead or 0) - apart)
    group_of: dict[str, str] = {}
    for name in instances:
        group_of.setdefault(_kind(name), groups[name])
    return Sharing(group_of, at_once)


def _groups(config: FlotillaConfig) -> tuple[dict[str, PlacementConfig], dict[str, str], dict[str, int]]:
    """Instances, their groups, and how many of each group but the shared cores compute at once."""
    instances = {
        name: drafter.placement
        for drafter in config.drafters
        if not drafter.runs_beside_target
        for name in instance_names(drafter.name, drafter.replicas)
    }
    plan = Plan()
    with contextlib.suppress(PlacementError):  # told when it is to be reserved
        plan = plan_cell(config)
    groups = processor_groups(plan, instances)
    shares: dict[str, float] = {}
    for name, group in groups.items():
        if group != SHARED_CORES:
            shares[group] = shares.get(group, 0.0) + min(1.0, instances[name].num_gpus)
    return instances, groups, {group: max(1, math.ceil(sum_ - ROUNDING)) for group, sum_ in shares.items()}


def _is_on_cores(group: str) -> bool:
    return group == SHARED_CORES or group.startswith("CPUs of ")


def _kind(instance: str) -> str:
    return instance.partition("/")[0]
