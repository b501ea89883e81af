"""CPUs that Ray reserves are ones that pods have: else a worker waits for ever, and nobody is told."""

from __future__ import annotations

from typing import Any

import pytest
from ray.autoscaler._private.kuberay import autoscaling_config

from cluster.config import FlotillaConfig
from cluster.placement import plan_cell
from tests.helm.rendered_chart import (
    cluster,
    files,
    flotilla_args,
    group,
    merged,
    refusal,
)


def pods(cpus: object, number: int = 1, **changes: Any) -> dict[str, Any]:
    resources = {"requests": {"cpu": cpus}, "limits": {"cpu": cpus}}
    return group(minReplicas=1, maxReplicas=number, resources=resources, **changes)


def lookup(name: str, **placement: object) -> dict[str, Any]:
    return {"kind": "prompt_lookup", "name": name, "placement": placement}


def config(drafters: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {"config": {"drafters": drafters, **fields}}


BESIDE = lookup("beside", collocate="target", num_cpus=2)
AWAY = lookup("away", num_cpus=3)
ALONE = lookup("alone", collocate="own-node", num_cpus=1)
LABELLED = lookup("labelled", num_cpus=1, labels={"role": "drafter"})
TWO_RANKS = {"target": {"tensor_parallel": 2, "placement": {"num_cpus": 2}}}
LABELS = {"rayLabels": {"role": "drafter"}}

CONFIGS = {
    "the target": config([lookup("free", collocate="target")]),
    "a larger target": config([BESIDE], target={"placement": {"num_cpus": 5}}),
    "drafters beside the first rank": config([BESIDE, {**BESIDE, "name": "other", "replicas": 2}]),
    "ranks that may be apart": config([BESIDE], **TWO_RANKS),
    "a drafter that is larger than the target": config([AWAY]),
    "a drafter on a node of its own": config([ALONE, AWAY, BESIDE, LABELLED], **TWO_RANKS),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_pod_must_hold_the_largest_bundle(name: str) -> None:
    """Of those that the cell asks Ray for."""
    values = CONFIGS[name]
    taken = merged(pods(64, 9, **LABELS), values)
    plan = plan_cell(FlotillaConfig.model_validate(flotilla_args(taken)))
    most = max(bundle.resources.get("CPU", 0.0) for bundle in plan.bundles)
    assert files(merged(pods(most, 9, **LABELS), values))
    assert "placement.num_cpus" in refusal(merged(pods(most - 1, 99, **LABELS), values))


def test_what_is_packed_strictly_is_in_one_pod() -> None:
    values = config([AWAY, BESIDE], pool={"strategy": "STRICT_PACK"})
    assert files(merged(pods(6), values))
    assert "asks for 6 CPUs on one node" in refusal(merged(pods(5, 9), values))


def test_all_cells_and_front_ends_must_find_room() -> None:
    scaling = {"cells": {"max": 3}, "front_ends": {"max": 4, "placement": {"num_cpus": 1}}}
    values = config([BESIDE], scaling=scaling)
    assert files(merged(pods(13), values))
    message = refusal(merged(pods(3, 4), values))
    assert "config asks for 13 CPUs" in message
    assert "at most 12" in message


def test_front_ends_count_where_they_run() -> None:
    groups = [
        {**pods(8, runs=["cells"])["workerGroups"][0], "name": "cells"},
        {**pods(1, 9, runs=["front-ends"])["workerGroups"][0], "name": "front-ends"},
    ]
    scaling = {"front_ends": {"placement": {"num_cpus": 2}}}
    message = refusal({"workerGroups": groups, "config": {"scaling": scaling}})
    assert "config.scaling.front_ends" in message
    assert "has 1 at most" in message


def test_a_worker_with_a_gpu_needs_both_in_one_pod() -> None:
    gpus = {**pods(1, gpu={"count": 1})["workerGroups"][0], "name": "gpu"}
    others = {**pods(16)["workerGroups"][0], "name": "cpu"}
    target = {"placement": {"num_gpus": 1, "num_cpus": 4}}
    message = refusal({"workerGroups": [gpus, others], "config": {"target": target, "drafters": []}})
    assert "config.target" in message
    assert "has 1 at most" in message


@pytest.mark.parametrize(
    ("resources", "params", "cpus"),
    [
        ({"requests": {"cpu": "1"}, "limits": {"cpu": "2500m"}}, {}, 3),
        ({"requests": {"cpu": 1.5}, "limits": {"memory": "4Gi"}}, {}, 2),
        ({"requests": {"cpu": "1"}, "limits": {"cpu": "1"}}, {"num-cpus": "6"}, 6),
    ],
)
def test_as_many_are_counted_as_the_autoscaler_does(
    resources: dict[str, Any], params: dict[str, str], cpus: int
) -> None:
    values = group(resources=resources, rayStartParams=params)
    (found,) = cluster(merged(values, config([], target={"placement": {"num_cpus": cpus}})))[
        "workerGroupSpecs"
    ]
    assert autoscaling_config._get_ray_resources_from_group_spec(found, is_head=False)["CPU"] == cpus
    assert "placement.num_cpus" in refusal(
        merged(values, config([], target={"placement": {"num_cpus": cpus + 1}}))
    )


def test_pods_without_cpus_are_refused_of_which_the_autoscaler_would_end() -> None:
    message = refusal(group(resources={"requests": {"memory": "4Gi"}, "limits": {"memory": "4Gi"}}))
    assert "workerGroups[0] (cpu)" in message
    assert "resources.limits" in message
