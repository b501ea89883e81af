"""What an upgrade of the release makes of the running cluster: nothing, more pods, or a second cluster."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.operator_rules import cluster_hash
from tests.helm.rendered_chart import (
    CHART,
    SCENARIOS,
    cluster,
    files,
    group,
    helm,
    merged,
    ray_service,
    scenario,
)

HASH = f"hmac-sha256:{'0' * 32}:{'0' * 64}"


@pytest.fixture(scope="module")
def next_chart(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The chart with its version and that of the application raised, and nothing else changed."""
    copy = tmp_path_factory.mktemp("next") / "flotilla"
    shutil.copytree(CHART, copy)
    described = yaml.safe_load((copy / "Chart.yaml").read_text())
    (copy / "Chart.yaml").write_text(yaml.safe_dump(described | {"version": "9.8.7", "appVersion": "9.8.7"}))
    return helm.Chart.load(copy)


def text_below(text: str, key: str) -> str:
    return text[text.index(f"\n  {key}:") :]


@pytest.mark.parametrize("name", ["defaults", *SCENARIOS])
def test_a_new_version_of_the_chart_leaves_the_cluster_byte_for_byte(name: str, next_chart: Any) -> None:
    values = {} if name == "defaults" else scenario(name)
    path = "flotilla/templates/rayservice.yaml"
    before, after = files(values)[path], files(values, loaded=next_chart)[path]
    assert before != after, "labels of the RayService do tell the version"
    assert text_below(before, "rayClusterConfig").encode() == text_below(after, "rayClusterConfig").encode()
    specs = [ray_service(values)["spec"], ray_service(values, loaded=next_chart)["spec"]]
    assert specs[0] == specs[1]


KEYS = {"apiKeys": {"enabled": True, "keys": [{"name": "a", "hash": HASH}]}}
GROUPS = group()["workerGroups"]

#: Changes that reach the running cluster, or none: values before, and what is merged into them.
IN_PLACE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another policy": ({}, {"config": {"policy": {"name": "fixed"}}}),
    "another model": ({}, {"config": {"target": {"path": "zoo:other"}}}),
    "more cells": ({}, {"config": {"scaling": {"cells": {"max": 2}}}}),
    "more replicas": (group(), group(maxReplicas=9, replicas=3)),
    "one more group, at the end": (group(), {"workerGroups": [*GROUPS, {**GROUPS[0], "name": "more"}]}),
    "labels of objects": ({}, {"commonLabels": {"team": "a"}}),
    "one more API key": (
        KEYS,
        {"apiKeys": {"keys": [*KEYS["apiKeys"]["keys"], {"name": "b", "hash": HASH}]}},
    ),
    "monitoring": ({}, {"monitoring": {"podMonitor": {"enabled": True}, "rules": {"enabled": True}}}),
    "an ingress": ({}, {"ingress": {"enabled": True, "host": "a.b"}}),
    "a network policy": ({}, {"networkPolicy": {"enabled": True}}),
    "a load balancer": ({}, {"service": {"type": "LoadBalancer"}}),
    "a disruption budget": (group(), group(podDisruptionBudget={"minAvailable": 1})),
    "how upgrades are done": ({}, {"upgrade": {"type": "None"}}),
}

SECOND_CLUSTER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another image": ({}, {"image": {"tag": "0.2.0"}}),
    "another Ray": ({}, {"rayVersion": "2.61.0"}),
    "resources of the head": ({}, {"head": {"resources": {"limits": {"cpu": "3"}}}}),
    "resources of a group": (group(), group(resources={"requests": {"cpu": "2"}, "limits": {"cpu": "2"}})),
    "a group before others": (group(), {"workerGroups": [{**GROUPS[0], "name": "more"}, *GROUPS]}),
    "one group fewer": ({"workerGroups": [*GROUPS, {**GROUPS[0], "name": "more"}]}, group()),
    "an environment variable": ({}, {"pods": {"env": [{"name": "A", "value": "b"}]}}),
    "a label of pods": ({}, {"pods": {"labels": {"team": "a"}}}),
    "API keys switched on": ({}, KEYS),
    "another source of models": ({}, {"models": {"source": "pvc", "pvc": {"claimName": "a"}}}),
    "the autoscaler": ({}, {"autoscaler": {"enabled": False}}),
    "Redis": ({}, {"gcsFaultTolerance": {"enabled": True, "redisAddress": "redis:6379"}}),
    "Ray's authentication": ({}, {"rayAuthentication": "disabled"}),
    "gRPC switched on": ({}, {"config": {"grpc": {"enabled": True}}}),
    "a longer drain": ({}, {"config": {"scaling": {"front_ends": {"drain_timeout_s": 600}}}}),
}


def makes_second_cluster(before: dict[str, Any], change: dict[str, Any]) -> bool:
    """Whether the operator would: neither equal, nor equal but for groups added at the end."""
    running, wanted = cluster(before), cluster(merged(before, change))
    groups = len(running["workerGroupSpecs"])
    return cluster_hash(running) not in (cluster_hash(wanted), cluster_hash(wanted, groups))


@pytest.mark.parametrize("name", IN_PLACE)
def test_it_makes_no_second_cluster(name: str) -> None:
    before, change = IN_PLACE[name]
    assert files(before) != files(merged(before, change)), "the change changes nothing"
    assert not makes_second_cluster(before, change)


@pytest.mark.parametrize("name", SECOND_CLUSTER)
def test_it_makes_a_second_cluster(name: str) -> None:
    assert makes_second_cluster(*SECOND_CLUSTER[name])


@pytest.mark.parametrize("name", [*IN_PLACE, *SECOND_CLUSTER])
def test_the_documentation_says_so(name: str) -> None:
    document = (CHART.parents[1] / "docs" / "kubernetes.md").read_text()
    section = document[document.index("## Upgrades") :]
    where = "In place" if name in IN_PLACE else "Second cluster"
    rows = [row for row in section.splitlines() if row.startswith("|") and f"| {name} |" in row]
    assert len(rows) == 1, f"one row for `{name}`"
    assert where.lower() in rows[0].lower()


def test_the_same_values_render_the_same_text() -> None:
    assert files(scenario("cells")) == files(scenario("cells"))


def test_chart_is_packaged_without_what_only_the_repository_needs(tmp_path: Path) -> None:
    packed = helm.Chart.load(helm.package(CHART, destination=tmp_path))
    names = {entry["name"] for entry in packed.files}
    assert {"files/first_token.py", "rules/flotilla-alerts.yaml"} <= names
    assert not any(name.startswith("ci/") for name in names)
