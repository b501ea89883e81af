"""Values of pods that are wrong are refused before anything reaches a cluster, by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.rendered_chart import files, group, refusal

#: By these the network policy, budgets, monitors, Services and the operator find pods, or a later version of
#: the chart would make a second cluster.
LABELS_OF_PODS = [
    "app.kubernetes.io/name",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/part-of",
    "app.kubernetes.io/component",
    "app.kubernetes.io/version",
    "flotilla/group",
    "ray.io/cluster",
    "ray.io/serve",
    "helm.sh/chart",
]
LABELS_OF_OBJECTS = [
    "app.kubernetes.io/name",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/part-of",
    "app.kubernetes.io/version",
    "app.kubernetes.io/managed-by",
    "helm.sh/chart",
]


@pytest.mark.parametrize("label", LABELS_OF_PODS)
def test_what_selects_pods_cannot_be_switched_off_by_a_label(label: str) -> None:
    labels = {label: "platform"}
    for values, where in (
        ({"pods": {"labels": labels}}, "/pods/labels"),
        # The operator writes these onto pods, over those of the template.
        (group(rayLabels=labels), "/workerGroups/0/rayLabels"),
    ):
        message = refusal(values)
        assert where in message
        assert label in message


@pytest.mark.parametrize("label", LABELS_OF_OBJECTS)
def test_labels_that_the_chart_sets_are_refused(label: str) -> None:
    labels = {label: "platform"}
    monitoring: dict[str, Any] = {"enabled": True, "labels": labels}
    for values, where in (
        ({"commonLabels": labels}, "/commonLabels"),
        ({"monitoring": {"podMonitor": monitoring}}, "/monitoring/podMonitor/labels"),
        ({"monitoring": {"rules": monitoring}}, "/monitoring/rules/labels"),
        ({"monitoring": {"dashboards": monitoring}}, "/monitoring/dashboards/labels"),
    ):
        message = refusal(values)
        assert where in message
        assert label in message


#: By name: values, and what the message must say.
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a checksum on pods, which would make a second cluster": (
        {"pods": {"annotations": {"checksum/config": "a"}}},
        ("/pods/annotations", "checksum/config"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name(name: str) -> None:
    values, named = REFUSED[name]
    message = refusal(values)
    for part in named:
        assert part in message


def test_labels_of_ones_own_are_taken() -> None:
    labels = {"example.org/team": "a", "app.kubernetes.io/component": "llm"}
    assert files({"commonLabels": labels, "pods": {"labels": {"team": "a"}}})
