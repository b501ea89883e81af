"""What Ray has in a group's pods, as those read it who must agree: operator, shell, autoscaler."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ray.autoscaler._private.kuberay import autoscaling_config

from tests.helm.operator_rules import read_resources, start_arguments, violations
from tests.helm.rendered_chart import SCENARIOS, cluster, gpu_group, group, ray_service, refusal, scenario


def of_autoscaler(worker_group: dict[str, Any]) -> dict[str, int]:
    """What the autoscaler expects a pod of the group to have."""
    return dict(autoscaling_config._get_ray_resources_from_group_spec(worker_group, is_head=False))


def of_ray_start(worker_group: dict[str, Any]) -> dict[str, float]:
    """What `ray start` is told that the pod has, but for CPUs and memory."""
    found = dict(argument[2:].split("=", 1) for argument in start_arguments(worker_group["rayStartParams"]))
    gpus = {"GPU": int(found["num-gpus"])} if "num-gpus" in found else {}
    return {**json.loads(found.get("resources", "{}")), **gpus}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_autoscaler_counts_on_what_pods_start_with(name: str) -> None:
    for worker_group in cluster(scenario(name))["workerGroupSpecs"]:
        expected = of_autoscaler(worker_group)
        assert {key: expected[key] for key in expected if key not in ("CPU", "memory")} == of_ray_start(
            worker_group
        )


@pytest.mark.parametrize(
    "resource", ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-3g.40gb", "amd.com/gpu"]
)
def test_whoever_gives_gpus_they_are_counted(resource: str) -> None:
    values = gpu_group(gpu={"count": 2, "resourceName": resource}, rayResources={"verifier": 4})
    assert violations(ray_service(values)) == []
    (found,) = cluster(values)["workerGroupSpecs"]
    assert of_autoscaler(found)["GPU"] == of_ray_start(found)["GPU"] == 2


def test_no_gpus_are_told_of_where_the_group_has_none() -> None:
    (found,) = cluster(group())["workerGroupSpecs"]
    assert "num-gpus" not in found["rayStartParams"]


def test_the_number_of_gpus_that_ray_is_told_may_be_another() -> None:
    (found,) = cluster(gpu_group(rayStartParams={"num-gpus": "4"}))["workerGroupSpecs"]
    assert of_ray_start(found)["GPU"] == 4


def test_resources_are_read_alike_by_all_three() -> None:
    (found,) = cluster(group(rayResources={"verifier": 4, "accelerator_type:L4": 1_000_000}))[
        "workerGroupSpecs"
    ]
    expected = {"verifier": 4, "accelerator_type:L4": 1_000_000, "flotilla-cell": 1, "flotilla-front-end": 1}
    assert read_resources(found["rayStartParams"]) == expected
    assert of_ray_start(found) == expected
    assert expected.items() <= of_autoscaler(found).items()


@pytest.mark.parametrize("quoted", [r'"{\"verifier\":4}"', "verifier=4", "{'verifier':4}"])
def test_resources_that_the_operator_cannot_read_would_be_found(quoted: str) -> None:
    service = json.loads(json.dumps(ray_service(group())))
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["rayStartParams"]["resources"] = quoted
    (found,) = violations(service)
    assert "rayStartParams.resources" in found


@pytest.mark.parametrize("amount", [0, 0.5, 4.5, -1])
def test_shares_of_a_resource_are_refused_which_the_autoscaler_would_die_of(amount: float) -> None:
    assert "/workerGroups/0/rayResources/verifier" in refusal(group(rayResources={"verifier": amount}))


def test_a_resource_whose_name_would_end_the_shells_quotes_is_refused() -> None:
    message = refusal(group(rayResources={"it's": 1}))
    assert "/workerGroups/0/rayResources" in message
    assert "not allowed" in message
