"""What must be together on one node fits into a pod, as `cluster/placement.py` puts it together."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config import FlotillaConfig
from cluster.placement import plan_cell
from tests.helm.rendered_chart import files, group, merged, refusal

TWO_RANKS = {"path": "zoo:a", "tensor_parallel": 2, "placement": {"num_gpus": 1}}


def drafter(name: str = "small", **placement: Any) -> dict[str, Any]:
    replicas = placement.pop("replicas", 1)
    return {"kind": "model", "name": name, "path": "zoo:b", "replicas": replicas, "placement": placement}


#: By name: configurations whose GPUs are in bundles of several.
TOGETHER: dict[str, dict[str, Any]] = {
    "a drafter with a GPU beside the target": {
        "target": {**TWO_RANKS, "tensor_parallel": 1},
        "drafters": [drafter(num_gpus=1, collocate="target")],
    },
    "shares of two GPUs": {
        "target": {**TWO_RANKS, "placement": {"num_gpus": 0.8}},
        "drafters": [drafter(num_gpus=0.2, replicas=3, collocate="target")],
    },
    "a rank of two GPUs": {
        "target": {**TWO_RANKS, "tensor_parallel": 1, "placement": {"num_gpus": 2}},
        "drafters": [],
    },
    "a drafter of two GPUs": {"target": TWO_RANKS, "drafters": [drafter(num_gpus=2)]},
    "ranks that a drafter on a node of its own brings together": {
        "target": TWO_RANKS,
        "drafters": [
            drafter(num_gpus=1, collocate="own-node"),
            drafter("anywhere", num_gpus=1),
            drafter("labelled", num_gpus=1, labels={"a": "b"}),
        ],
    },
}


def in_pods_of(count: int, config: dict[str, Any]) -> dict[str, Any]:
    return merged(group(gpu={"count": count}, maxReplicas=8, rayLabels={"a": "b"}), {"config": config})


@pytest.mark.parametrize("name", TOGETHER)
def test_pods_have_as_many_gpus_as_the_largest_bundle(name: str) -> None:
    plan = plan_cell(FlotillaConfig.model_validate(TOGETHER[name]))
    largest = int(max(bundle.resources["GPU"] for bundle in plan.bundles))
    assert largest > 1
    assert files(in_pods_of(largest, TOGETHER[name]))
    message = refusal(in_pods_of(largest - 1, TOGETHER[name]))
    assert f"{largest} GPUs on one node" in message
    assert "gpu.count" in message


@pytest.mark.parametrize(
    ("share", "gpus"),
    [(0.8, 5), (0.6, 5), (1, 5), (0.5, 3), (0.3, 2)],  # the last two share a GPU
)
def test_shares_above_a_half_take_a_gpu_each(share: float, gpus: int) -> None:
    """Of five cells' targets."""
    config = {
        "target": {**TWO_RANKS, "tensor_parallel": 1, "placement": {"num_gpus": share}},
        "drafters": [],
        "scaling": {"cells": {"max": 5}},
    }
    enough = merged(group(gpu={"count": 1}, maxReplicas=gpus), {"config": config})
    assert files(enough)
    enough["workerGroups"][0]["maxReplicas"] = gpus - 1
    assert "at most 5 cells" in refusal(enough)


def test_ranks_and_drafters_of_more_than_half_a_gpu_take_one_each() -> None:
    ranks = {**TWO_RANKS, "placement": {"num_gpus": 0.6}}
    config = {"target": ranks, "drafters": [drafter(num_gpus=0.6, replicas=2)]}
    assert files(merged(group(gpu={"count": 4}, maxReplicas=1), {"config": config}))
    assert "4 GPUs" in refusal(merged(group(gpu={"count": 3}, maxReplicas=1), {"config": config}))


def test_what_is_packed_strictly_is_in_one_pod() -> None:
    config = {"target": TWO_RANKS, "drafters": [], "pool": {"strategy": "STRICT_PACK"}}
    assert files(in_pods_of(2, config))
    assert "2 GPUs on one node" in refusal(in_pods_of(1, config))


def test_ranks_may_be_in_several_pods_where_nothing_brings_them_together() -> None:
    assert files(in_pods_of(1, {"target": TWO_RANKS, "drafters": [drafter(num_gpus=1)]}))
