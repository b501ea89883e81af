"""What `flotilla plan` writes is taken by the chart, for every profile there is."""

from __future__ import annotations

import pytest

pytest.importorskip("helm", reason="helm-python-sdk is not installed (extra dev-kubernetes)")

from simulator import chart_values, hardware, systems
from simulator.sizing import Load
from tests.helm import operator_rules, rendered_chart


@pytest.mark.parametrize("name", sorted({*hardware.names()} - {"demo-2-cores"}))
def test_a_plan_renders_with_as_many_gpus_as_it_counts(name: str) -> None:
    profile, load = hardware.load(name), Load()
    values = chart_values.values(profile, load, systems.parse("flotilla"), 3, 0.95)
    service = rendered_chart.ray_service(values)
    assert operator_rules.violations(service) == []
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == sum(chart_values.gpus(profile)[:2])
    assert group["maxReplicas"] == 3
