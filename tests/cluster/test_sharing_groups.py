"""From placement to the drafters that share processors."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import FlotillaConfig
from cluster.core import SchedulerCore
from cluster.cost_model import DEFAULT_PROFILE, CostModel
from cluster.free_cores import settle_draft_ahead
from cluster.placement import plan_cell
from cluster.policies.registry import make_policy
from cluster.sharing import SHARED_CORES, processor_groups, sharing_of
from tests.cluster.test_placement import cell


def settled(config: FlotillaConfig, num_cores: int) -> FlotillaConfig:
    return settle_draft_ahead(config, num_cores)


def partners(config: FlotillaConfig) -> set[frozenset[str]]:
    """Kinds that draft on the same processors, without those that share with nobody."""
    group_of = sharing_of(config).group_of
    found: dict[str, set[str]] = {}
    for kind, group in group_of.items():
        found.setdefault(group, set()).add(kind)
    return {frozenset(kinds) for kinds in found.values() if len(kinds) > 1}


@pytest.mark.parametrize(
    ("placements", "together", "at_once", "ahead"),
    [
        # Drafters, who shares with whom, how many of those on shared cores at once, all that may draft ahead.
        ([{}, {}], {"d0", "d1"}, 1, 1),
        ([{"collocate": "target"}, {}], {"d0", "d1"}, 1, 1),
        ([{"num_gpus": 1}, {}, {}], {"d1", "d2"}, 1, 2),
        ([{"num_gpus": 1}, {"num_gpus": 1}], set(), 1, 3),
        ([{"num_gpus": 0.5}, {"num_gpus": 0.5}, {"num_gpus": 1}], {"d0", "d1"}, 1, 3),
        ([{"num_gpus": 0.5}, {"num_gpus": 0.25, "collocate": "target"}], set(), 1, 3),
        (
            [{"labels": {"role": "a"}}, {"labels": {"role": "a"}}, {"labels": {"role": "b"}}],
            {"d0", "d1"},
            1,
            3,
        ),
        ([{"num_cpus": 1, "labels": {"role": "a"}}, {"labels": {"role": "a"}}], set(), 1, 2),
        ([{"num_cpus": 1}, {}, {}], {"d1", "d2"}, 1, 1),
    ],
)
def test_on_two_cores(placements: list[dict[str, Any]], together: set[str], at_once: int, ahead: int) -> None:
    config = settled(cell({}, *placements), num_cores=2)
    assert partners(config) == ({frozenset(together)} if together else set())
    assert sharing_of(config).at_once[SHARED_CORES] == at_once
    assert config.scheduler.draft_ahead == ahead


def test_drafters_with_nodes_of_their_own_share_with_nobody_and_the_rest_with_the_target() -> None:
    own = {"collocate": "own-node"}
    config = cell({}, dict(own), dict(own), {}, {"collocate": "target"})
    groups = processor_groups(plan_cell(config), {d.name: d.placement for d in config.drafters})
    assert groups["d0"] != groups["d1"]
    assert groups["d2"] == groups["d3"] == SHARED_CORES
    assert settled(config, 2).scheduler.draft_ahead == 3


def test_more_cores_let_more_of_those_that_share_draft_at_once() -> None:
    config = settled(cell({}, {}, {}, {"num_gpus": 1}), num_cores=4)
    sharing = sharing_of(config)
    assert sharing.at_once[SHARED_CORES] == 3
    assert sharing.seconds({"d0": 1.0, "d1": 1.0, "d2": 1.0}, {}) == 1.0


def test_shares_of_devices_take_as_few_devices_as_hold_them() -> None:
    config = settled(cell({}, {"num_gpus": 0.4, "replicas": 3}, {"num_gpus": 0.3}), num_cores=2)
    assert sharing_of(config).at_once["shares of GPUs"] == 2


def test_the_selector_of_a_cell_is_told() -> None:
    config = settled(cell({}, {"num_gpus": 1}, {}, {}), num_cores=2)
    core = SchedulerCore(config, make_policy(config.policy), CostModel(DEFAULT_PROFILE))
    assert core.pool.costs.sharing == sharing_of(config)


placements = st.lists(
    st.fixed_dictionaries(
        {
            "num_gpus": st.sampled_from([0.0, 0.5, 1.0]),
            "num_cpus": st.sampled_from([0.0, 1.0]),
            "collocate": st.sampled_from(["anywhere", "target", "own-node"]),
        }
    ),
    min_size=1,
    max_size=5,
)


@given(placements, st.integers(1, 16))
def test_whole_devices_cores_and_nodes_are_nobody_elses(placed: list[dict[str, Any]], cores: int) -> None:
    config = settled(cell({}, *(dict(one) for one in placed)), cores)
    group_of = sharing_of(config).group_of
    for number, placement in enumerate(placed):
        mine = [kind for kind, group in group_of.items() if group == group_of[f"d{number}"]]
        if placement["num_gpus"] == 1 or (placement["num_cpus"] and not placement["num_gpus"]):
            assert mine == [f"d{number}"]
