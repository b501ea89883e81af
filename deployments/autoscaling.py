"""Ray Serve's autoscaling policies of cells and front ends; what they decide is in `scaling_rules`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from ray.serve.config import AutoscalingContext

from cluster.scaling_config import CellScalingConfig, FrontEndScalingConfig
from deployments.scaling_rules import (
    LOOK_BACK_S,
    METRICS_INTERVAL_S,
    Memory,
    desired_cells,
    desired_front_ends,
)


def by_replica(metrics: Mapping[str, Mapping[Any, float]] | None) -> list[dict[str, float]]:
    """Stats of each replica, from Serve's values by metric and replica."""
    found: dict[Any, dict[str, float]] = {}
    for name, values in (metrics or {}).items():
        for replica, value in values.items():
            found.setdefault(replica, {})[name] = value
    return list(found.values())


class CellPolicy:
    """Serve's autoscaling policy of the cells; keyword arguments are the fields of `CellScalingConfig`."""

    def __init__(self, **config: Any) -> None:
        self._config = CellScalingConfig.model_validate(config)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Called by Serve's controller about every tenth of a second."""
        wanted, memory = desired_cells(
            by_replica(context.aggregated_metrics),
            context.target_num_replicas,
            context.current_time or 0.0,
            self._config,
            _remembered(context.policy_state),
        )
        return wanted, asdict(memory)


class FrontEndPolicy:
    """Serve's autoscaling policy of the front ends.

    Args:
        least: front ends at least.
        config: fields of `FrontEndScalingConfig`.
    """

    def __init__(self, least: int, **config: Any) -> None:
        self._least = least
        self._config = FrontEndScalingConfig.model_validate(config)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Called by Serve's controller about every tenth of a second."""
        wanted, memory = desired_front_ends(
            [one.get("streams", 0.0) for one in by_replica(context.aggregated_metrics)],
            context.target_num_replicas,
            context.current_time or 0.0,
            self._least,
            self._config,
            _remembered(context.policy_state),
        )
        return wanted, asdict(memory)


def _remembered(state: Mapping[str, Any]) -> Memory:
    """Our part of the state; Serve keeps its own in it, too."""
    return Memory(**{part.name: state[part.name] for part in fields(Memory) if part.name in state})


def cell_autoscaling(config: CellScalingConfig) -> dict[str, Any]:
    """Serve's `autoscaling_config` for the cells."""
    policy = {
        "policy_function": "deployments.autoscaling:CellPolicy",
        "policy_kwargs": config.model_dump(mode="json"),
    }
    return _autoscaling(config.min, config.max, policy)


def front_end_autoscaling(least: int, config: FrontEndScalingConfig) -> dict[str, Any]:
    """Serve's `autoscaling_config` for the front ends."""
    policy = {
        "policy_function": "deployments.autoscaling:FrontEndPolicy",
        "policy_kwargs": {"least": least, **config.model_dump(mode="json")},
    }
    return _autoscaling(least, max(config.max or least, least), policy)


def _autoscaling(least: int, most: int, policy: dict[str, Any]) -> dict[str, Any]:
    return {
        "min_replicas": least,
        "max_replicas": most,
        "initial_replicas": least,
        # The policy itself waits; Serve's delays would come on top.
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "metrics_interval_s": METRICS_INTERVAL_S,
        "look_back_period_s": LOOK_BACK_S,
        "policy": policy,
    }
