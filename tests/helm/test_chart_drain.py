"""Pods have as long to end as what goes on in them, and Ray drains its node for as long."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config import FlotillaConfig
from cluster.scaling_config import CellScalingConfig, FrontEndScalingConfig
from deployments.application import build_app
from tests.helm.operator_rules import Object
from tests.helm.rendered_chart import SCENARIOS, cluster, flotilla_args, group, merged, scenario, templates

DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
OF_CELLS, OF_FRONT_ENDS = (
    settings.model_fields["drain_timeout_s"].default
    for settings in (CellScalingConfig, FrontEndScalingConfig)
)


def times(values: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Seconds of a pod to end and of Ray to drain, by group."""
    found = {}
    for name, template in templates(cluster(values)):
        pod: Object = template["spec"]
        (drain,) = [one["value"] for one in pod["containers"][0]["env"] if one["name"] == DRAIN]
        found[name] = (pod["terminationGracePeriodSeconds"], int(drain))
    return found


def groups(*runs: list[str]) -> dict[str, Any]:
    found = [{**group()["workerGroups"][0], "name": f"group-{i}", "runs": run} for i, run in enumerate(runs)]
    return {"workerGroups": found}


def drains(cells: float, front_ends: float) -> dict[str, Any]:
    return {
        "config": {
            "scaling": {"cells": {"drain_timeout_s": cells}, "front_ends": {"drain_timeout_s": front_ends}}
        }
    }


def test_unless_told_otherwise_it_is_what_the_configuration_says() -> None:
    assert max(OF_CELLS, OF_FRONT_ENDS) == OF_FRONT_ENDS
    found = times(groups(["cells", "front-ends"], []))
    assert found["group-0"][0] == found["head"][0] == OF_FRONT_ENDS + 30
    assert found["group-1"][0] == OF_CELLS + 30


@pytest.mark.parametrize(("cells", "front_ends", "longest"), [(60, 90, 90), (120, 20, 120), (1.5, 2.25, 3)])
def test_it_is_the_longest_of_what_goes_on_in_the_pod(cells: float, front_ends: float, longest: int) -> None:
    values = merged(groups(["cells"], ["front-ends"], []), drains(cells, front_ends))
    found = {name: grace - 30 for name, (grace, _) in times(values).items()}
    # Streams pass the proxy of any pod that runs something. Ranks and drafters alone have none.
    alone = 2 if cells == 1.5 else cells
    assert found == {"head": longest, "group-0": longest, "group-1": longest, "group-2": alone}


@pytest.mark.parametrize("name", SCENARIOS)
def test_ray_drains_until_shortly_before_the_pod_is_killed(name: str) -> None:
    for grace, drain in times(scenario(name)).values():
        assert 0 < grace - drain <= 10


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_replica_that_serve_stops_has_its_whole_time(name: str) -> None:
    """Serve stops replicas of a node when its drain ends in as long as they are given."""
    front_end = build_app(FlotillaConfig.model_validate(flotilla_args(scenario(name))))._bound_deployment
    cell = front_end.init_args[1]._bound_deployment
    given = {
        part: one._deployment_config.graceful_shutdown_timeout_s
        for part, one in (("front-ends", front_end), ("cells", cell))
    }
    found = times(scenario(name))
    for values in scenario(name)["workerGroups"]:
        for part in values.get("runs", given):
            # What is left is for those that replace them to start.
            assert found[values["name"]][1] >= given[part] + 20


def test_a_time_of_ones_own_wins() -> None:
    values = merged(group(terminationGracePeriodSeconds=600), {"head": {"terminationGracePeriodSeconds": 20}})
    assert times(values) == {"head": (20, 15), "cpu": (600, 595)}
    assert times(group(terminationGracePeriodSeconds=3))["cpu"] == (3, 0)


def test_how_long_ray_drains_may_be_said_apart() -> None:
    values = merged(group(), {"pods": {"env": [{"name": DRAIN, "value": "7"}]}})
    assert times(values)["cpu"] == (OF_FRONT_ENDS + 30, 7)
