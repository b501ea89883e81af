"""What values make of pods: labels, environment, mounts, containers, time to end."""

from __future__ import annotations

import pytest

from tests.helm.rendered_chart import cluster, group, merged, objects, of_kind, templates


@pytest.mark.parametrize("name", ["on", "null", "true"])
def test_a_groups_name_stays_text(name: str) -> None:
    values = group(name=name, podDisruptionBudget={"minAvailable": 1})
    (found,) = cluster(values)["workerGroupSpecs"]
    assert found["groupName"] == name
    assert found["template"]["metadata"]["labels"]["flotilla/group"] == name
    (budget,) = of_kind("PodDisruptionBudget", values)
    assert budget["spec"]["selector"]["matchLabels"]["flotilla/group"] == name


def test_a_releases_name_stays_text() -> None:
    for found in objects({"fullnameOverride": "llm"}, name="2024"):
        assert found["metadata"]["labels"]["app.kubernetes.io/instance"] == "2024"


def test_a_label_may_be_both_of_all_objects_and_of_a_kind() -> None:
    on = {"enabled": True, "labels": {"release": "of-kind"}}
    values = {"commonLabels": {"release": "of-all"}, "monitoring": {"podMonitor": on, "rules": on}}
    found = {each["kind"]: each["metadata"]["labels"]["release"] for each in objects(values)}
    assert found == {
        "RayService": "of-all",
        "Pod": "of-all",
        "PodMonitor": "of-kind",
        "PrometheusRule": "of-kind",
    }


def test_labels_of_pods_are_beside_those_of_the_chart() -> None:
    values = merged(group(), {"pods": {"labels": {"team": "a"}}})
    for name, template in templates(cluster(values)):
        assert template["metadata"]["labels"] == {
            "app.kubernetes.io/instance": "demo",
            "app.kubernetes.io/part-of": "flotilla",
            "flotilla/group": name,
            "team": "a",
        }
