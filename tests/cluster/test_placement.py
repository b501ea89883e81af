"""From configuration to Ray bundles: nobody is forgotten, nothing reserved twice, contradictions told."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import FlotillaConfig
from cluster.drafter_config import PromptLookupConfig
from cluster.placement import (
    NODE_ID,
    TOKEN_CPUS,
    PlacementError,
    free_names,
    instance_names,
    lacks,
    plan_added,
    plan_cell,
    rank_name,
    reserved_cpus,
    shortage,
)


def cell(
    target: dict[str, Any] | None = None, *drafters: dict[str, Any], ranks: int = 1, strategy: str = "PACK"
) -> FlotillaConfig:
    """A cell with these placements; `replicas` may be among a drafter's."""
    pooled = []
    for number, placement in enumerate(drafters):
        replicas = placement.pop("replicas", 1)
        pooled.append(
            {"kind": "prompt_lookup", "name": f"d{number}", "replicas": replicas, "placement": placement}
        )
    return FlotillaConfig.model_validate(
        {
            "target": {"path": "t", "tensor_parallel": ranks, "placement": target or {}},
            "drafters": pooled,
            "pool": {"strategy": strategy},
        }
    )


def bundles(config: FlotillaConfig) -> list[tuple[dict[str, float], dict[str, str], list[str]]]:
    return [(bundle.resources, bundle.labels, bundle.seats) for bundle in plan_cell(config).bundles]


def test_on_one_machine_only_the_target_reserves_something() -> None:
    config = cell({}, {}, {"replicas": 3})
    assert bundles(config) == [({"CPU": 1.0}, {}, ["verifier rank 0"])]
    assert plan_cell(config).seat_of("d0") is None


def test_who_asks_for_nothing_reserves_nothing() -> None:
    assert bundles(cell({"num_cpus": 0}, {}, {})) == []


def test_devices_of_their_own_and_shares_of_one() -> None:
    config = cell({"num_gpus": 1}, {"num_gpus": 1}, {"num_gpus": 0.25, "replicas": 2}, ranks=2)
    assert bundles(config) == [
        ({"CPU": 1.0, "GPU": 1.0}, {}, ["verifier rank 0"]),
        ({"CPU": 1.0, "GPU": 1.0}, {}, ["verifier rank 1"]),
        ({"GPU": 1.0}, {}, ["d0"]),
        ({"GPU": 0.25}, {}, ["d1/0"]),
        ({"GPU": 0.25}, {}, ["d1/1"]),
    ]


def test_collocated_drafters_share_the_bundle_and_so_the_device_of_the_first_rank() -> None:
    config = cell({"num_gpus": 0.5}, {"num_gpus": 0.5, "collocate": "target"}, {"collocate": "target"})
    assert bundles(config) == [({"CPU": 1.0, "GPU": 1.0}, {}, ["verifier rank 0", "d0", "d1"])]


def test_more_than_one_device_is_reserved_in_whole_ones() -> None:
    config = cell({"num_gpus": 1}, {"num_gpus": 0.5, "collocate": "target"})
    assert bundles(config)[0][0]["GPU"] == 2.0


def test_labels_need_a_bundle_though_nothing_is_reserved() -> None:
    config = cell({}, {"labels": {"role": "drafter"}})
    assert bundles(config)[1] == ({"CPU": TOKEN_CPUS}, {"role": "drafter"}, ["d0"])


def test_a_node_of_its_own_spreads_the_cell() -> None:
    own = {"collocate": "own-node"}
    config = cell({}, {}, {**own, "replicas": 2}, {"num_cpus": 1}, {"labels": {"zone": "b"}}, ranks=2)
    plan = plan_cell(config)
    assert plan.strategy == "STRICT_SPREAD"
    assert [bundle.seats for bundle in plan.bundles] == [
        ["verifier rank 0", "verifier rank 1", "d0", "d2"],
        ["d1/0"],
        ["d1/1"],
        ["d3"],
    ]
    assert plan.bundles[0].resources == {"CPU": 3.0}


def test_contradictions_are_told() -> None:
    with pytest.raises(PlacementError, match=r"zone=b.*zone=a"):
        plan_cell(cell({"labels": {"zone": "a"}}, {"labels": {"zone": "b"}, "collocate": "target"}))
    with pytest.raises(PlacementError, match="STRICT_PACK"):
        plan_cell(cell({}, {"collocate": "own-node"}, strategy="STRICT_PACK"))


def test_a_gpu_and_a_half_is_no_placement() -> None:
    with pytest.raises(ValueError, match="whole GPUs"):
        cell({"num_gpus": 1.5})


placements = st.fixed_dictionaries(
    {},
    optional={
        "num_cpus": st.sampled_from([0.0, 0.5, 2.0]),
        "num_gpus": st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]),
        "resources": st.sampled_from([{}, {"fast": 1.0}]),
        "labels": st.sampled_from([{}, {"role": "drafter"}]),
        "collocate": st.sampled_from(["target", "anywhere", "own-node"]),
        "replicas": st.integers(1, 3),
    },
)


@given(st.lists(placements, max_size=4), st.integers(1, 3))
def test_every_need_is_reserved_in_one_bundle(drafters: list[dict[str, Any]], ranks: int) -> None:
    config = cell({"num_gpus": 0.5}, *[dict(one) for one in drafters], ranks=ranks)
    plan = plan_cell(config)
    needs = {rank_name(rank): config.target.placement for rank in range(ranks)}
    collocated: dict[str, str] = {}
    for drafter in config.drafters:
        for name in instance_names(drafter.name, drafter.replicas):
            needs[name] = drafter.placement  # type: ignore[assignment]
            collocated[name] = drafter.placement.collocate
    seats = [name for bundle in plan.bundles for name in bundle.seats]
    assert len(seats) == len(set(seats))
    for bundle in plan.bundles:
        assert bundle.resources
        assert all(amount > 0 for amount in bundle.resources.values())
        for resource, amount in bundle.resources.items():
            wanted = {"CPU": "num_cpus", "GPU": "num_gpus"}.get(resource, "")
            needed = sum(
                getattr(needs[name], wanted) if wanted else needs[name].resources.get(resource, 0.0)
                for name in bundle.seats
            )
            assert needed <= amount < needed + 1
            assert resource != "GPU" or amount < 1 or amount == int(amount)
    for name, placement in needs.items():
        seat = plan.seat_of(name)
        if seat is None:
            assert not any((placement.num_cpus, placement.num_gpus, placement.resources, placement.labels))
        else:
            assert placement.labels.items() <= plan.bundles[seat].labels.items()
        if collocated.get(name) == "target":
            assert seat == plan.seat_of(rank_name(0))
        if collocated.get(name) == "own-node":
            assert seat is not None
            assert plan.bundles[seat].seats == [name]
            assert plan.strategy == "STRICT_SPREAD"


def test_names_of_instances_stay_and_new_ones_fill_the_gaps() -> None:
    assert instance_names("a", 1) == ["a"]
    assert instance_names("a", 2) == ["a/0", "a/1"]
    assert free_names("a", ["a"], 2) == ["a/1", "a/2"]
    assert free_names("a", ["a/0", "a/2"], 2) == ["a/1", "a/3"]
    assert free_names("a", [], 1) == ["a"]


def test_an_added_drafter_is_told_where_by_node_ids() -> None:
    def added(**placement: Any) -> list[dict[str, str]]:
        config = PromptLookupConfig.model_validate({"placement": placement})
        return [bundle.labels for bundle in plan_added("new", config, "t", ["t", "a", "t"]).bundles]

    assert added() == []
    assert added(num_cpus=1) == [{}]
    assert added(collocate="target") == [{NODE_ID: "t"}]
    assert added(collocate="own-node") == [{NODE_ID: "!in(a,t)"}]
    assert added(collocate="own-node", labels={"zone": "b"}) == [{NODE_ID: "!in(a,t)", "zone": "b"}]


def node(**resources: float) -> dict[str, object]:
    return {"Resources": resources, "Labels": {NODE_ID: "1"}}


def test_it_is_said_what_is_missing() -> None:
    plan = plan_cell(cell({"num_gpus": 1}, {"num_gpus": 1}))
    message = shortage(plan, [node(CPU=4.0, GPU=1.0)])
    assert message == (
        "waiting for 1 CPU, 2 GPU for verifier rank 0, d0; the cluster has 4 CPU, 1 GPU, 1 node: it must grow"
    )
    assert "others may be using them" in shortage(plan, [node(CPU=4.0, GPU=1.0)] * 2)


def test_it_is_said_what_one_machine_will_never_have() -> None:
    plan = plan_cell(cell({"num_gpus": 1}, {"num_gpus": 1, "resources": {"fast": 0.5}}, {}))
    assert lacks(plan, node(CPU=4.0)) == "2 GPU (it has 0), 0.5 fast (it has 0) for verifier rank 0, d0"
    assert lacks(plan, node(CPU=4.0, GPU=1.0, fast=1.0)) == "2 GPU (it has 1) for verifier rank 0, d0"
    assert lacks(plan, node(CPU=4.0, GPU=2.0, fast=0.5)) == ""
    assert lacks(plan_cell(cell({"num_cpus": 0}, {})), node(CPU=1.0)) == ""
    spread = plan_cell(cell({}, {"collocate": "own-node"}))
    assert lacks(spread, node(CPU=64.0)) == "2 nodes, which verifier rank 0, d0 are to be spread over"


def test_it_is_said_which_labels_are_missing() -> None:
    plan = plan_cell(cell({"num_cpus": 0}, {"labels": {"role": "drafter"}}))
    message = shortage(plan, [node(CPU=4.0)])
    assert "a node with role=drafter for d0" in message
    assert "1 node, none of them labelled" in message


def test_on_one_machine_new_cells_and_front_ends_find_cpus_beside_those_they_replace() -> None:
    """There were as many as one set reserves: new cells waited for CPUs, and a rollout did not end."""
    config = cell({"num_cpus": 1}, {"num_cpus": 0.5, "replicas": 2}, ranks=2)
    assert reserved_cpus(config) == 2 * 3
    raw = config.model_dump() | {
        "scaling": {
            "cells": {"max": 3, "placement": {"num_cpus": 1}},
            "front_ends": {"max": 4, "placement": {"num_cpus": 0.25}},
        }
    }
    assert reserved_cpus(FlotillaConfig.model_validate(raw)) == 2 * (3 * (3 + 1) + 1)
