"""What `flotilla plan` writes is taken by the chart, for every profile there is."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("helm", reason="helm-python-sdk is not installed (extra dev-kubernetes)")

from cluster.config import FlotillaConfig
from simulator import chart_values, hardware, systems
from simulator.sizing import MOST_CELLS, Load
from tests.helm import operator_rules, rendered_chart


@pytest.mark.parametrize("name", sorted({*hardware.names()} - {"demo-2-cores"}))
def test_a_plan_renders_with_as_many_gpus_as_it_counts(name: str) -> None:
    profile, load = hardware.load(name), Load()
    values = chart_values.values(profile, load, systems.parse("flotilla"), 3, 0.95)
    service = rendered_chart.ray_service(values)
    assert operator_rules.violations(service) == []
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    found = {group["groupName"]: (gpus_of(group), group["maxReplicas"]) for group in groups}
    of_target, of_drafters, _ = chart_values.gpus(profile)
    of_their_own = {"drafter": (1, 3 * of_drafters)} if of_drafters else {}
    assert found == {"cell": (of_target, 3), **of_their_own}
    config = FlotillaConfig.model_validate(rendered_chart.flotilla_args(values))
    names = [*profile.drafters, *(["eagle"] if profile.eagle is not None else [])]
    assert [drafter.name for drafter in config.drafters] == names


def gpus_of(group: dict[str, Any]) -> int:
    return int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])


def test_the_largest_plan_is_as_large_as_the_chart_takes() -> None:
    profile = hardware.load("llama-8b-h200")
    values = chart_values.values(profile, Load(), systems.parse("flotilla"), MOST_CELLS, 0.95)
    assert rendered_chart.files(values)
    values["workerGroups"][0]["maxReplicas"] += 1
    assert "/workerGroups/0/maxReplicas" in rendered_chart.refusal(values)
