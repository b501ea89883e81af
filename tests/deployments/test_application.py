"""What the Ray Serve application asks Ray for, for its cells, front ends and directory."""

from __future__ import annotations

from typing import Any

from cluster.config import FlotillaConfig
from deployments.application import build_app


def options(scaling: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Options of the actors of replicas, by deployment."""
    config = FlotillaConfig.model_validate({"target": {"path": "x"}, "scaling": scaling})
    front_end = build_app(config)._bound_deployment
    _, cell, directory = front_end.init_args
    deployments = [front_end, cell._bound_deployment, directory._bound_deployment]
    return {each.name: each.ray_actor_options for each in deployments}


def asked(scaling: dict[str, Any]) -> dict[str, tuple[float, dict[str, float]]]:
    """CPUs and custom resources by deployment."""
    return {name: (found["num_cpus"], found["resources"]) for name, found in options(scaling).items()}


def test_no_replica_is_made_by_way_of_another_process() -> None:
    """As one with an environment of its own would be: Ray starts a process that imports Ray to set it."""
    assert all(not found.get("runtime_env") for found in options({}).values())


def test_nothing_is_asked_for_by_default() -> None:
    assert asked({}) == {"FrontEnd": (0, {}), "Cell": (0, {}), "Directory": (0, {})}


def test_what_is_configured_is_asked_for_and_the_directory_is_beside_front_ends() -> None:
    scaling = {
        "cells": {"placement": {"resources": {"engine": 0.001}}},
        "front_ends": {"placement": {"num_cpus": 1, "resources": {"edge": 1}}},
    }
    assert asked(scaling) == {
        "Cell": (0, {"engine": 0.001}),
        "FrontEnd": (1, {"edge": 1}),
        "Directory": (0, {"edge": 0.001}),
    }
