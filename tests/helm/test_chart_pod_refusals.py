"""Values of pods that are wrong are refused before anything reaches a cluster, by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.rendered_chart import files, group, merged, refusal

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


def places_refused(values: dict[str, Any], label: str) -> set[str]:
    """Where a label is refused: all places of it by one rendering, as each takes long."""
    lines = refusal(values).splitlines()
    return {line.split("'")[1].removesuffix(f"/{label}") for line in lines if f"/{label}': false" in line}


@pytest.mark.parametrize("label", LABELS_OF_PODS)
def test_what_selects_pods_cannot_be_switched_off_by_a_label(label: str) -> None:
    labels = {label: "platform"}
    # The operator writes `rayLabels` onto pods, over those of the template.
    everywhere = merged(
        {"pods": {"labels": labels}, "head": {"labels": labels}}, group(rayLabels=labels, labels=labels)
    )
    assert places_refused(everywhere, label) == {
        "/pods/labels",
        "/workerGroups/0/rayLabels",
        "/workerGroups/0/labels",
        "/head/labels",
    }


@pytest.mark.parametrize("name", ["my team", "/team", "Example.org/team", "a/b/c", "-team", "t" * 64])
def test_what_is_no_name_of_a_label_is_refused(name: str) -> None:
    labels = {name: "a"}
    pods = {"pods": {"labels": labels, "annotations": labels}}
    everywhere = merged(pods, {"commonLabels": labels}, group(rayLabels=labels))
    # Names are refused without their places.
    assert refusal(everywhere).count(f"'{name}' does not match") == 4


@pytest.mark.parametrize("label", LABELS_OF_OBJECTS)
def test_labels_that_the_chart_sets_are_refused(label: str) -> None:
    labels = {label: "platform"}
    monitoring: dict[str, Any] = {"enabled": True, "labels": labels}
    kinds = ("podMonitor", "rules", "dashboards")
    everywhere = {"commonLabels": labels, "monitoring": dict.fromkeys(kinds, monitoring)}
    places = {"/commonLabels", *(f"/monitoring/{kind}/labels" for kind in kinds)}
    assert places_refused(everywhere, label) == places


ON_VOLUME = {"kind": "model", "name": "small", "placement": {"collocate": "target"}}
VOLUME = [{"name": "own", "emptyDir": {}}]
DOWNLOAD = {
    "source": "download",
    "download": [{"repository": "a/b", "directory": "a", "revision": "0" * 40}],
}
MODELS = {"models": {"source": "pvc", "pvc": {"claimName": "weights"}}}

#: By name: values, and what the message must say.
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a checksum on pods, which would make a second cluster": (
        {"pods": {"annotations": {"checksum/config": "a"}}},
        ("/pods/annotations", "checksum/config"),
    ),
    "a checksum on pods of a group": (
        group(annotations={"checksum/config": "a"}),
        ("/workerGroups/0/annotations", "checksum/config"),
    ),
    "a container called as Ray's": (
        {"pods": {"extraContainers": [{"name": "ray-worker", "image": "a"}]}},
        ("workerGroups[0] (cpu)", "two containers", "ray-worker"),
    ),
    "a container called as one that the operator adds": (
        {"pods": {"initContainers": [{"name": "wait-gcs-ready", "image": "a"}]}},
        ("head", "two containers", "wait-gcs-ready"),
    ),
    "a container with a volume that there is not": (
        {"pods": {"extraContainers": [{"name": "a", "image": "a", "volumeMounts": [{"name": "own"}]}]}},
        ("head", "pods.extraContainers", '"own"'),
    ),
    "a container without image": (
        {"pods": {"extraContainers": [{"name": "a"}]}},
        ("/extraContainers/0", "image"),
    ),
    "a probe of nothing, only how often": (
        group(probes={"readinessProbe": {"periodSeconds": 3}}),
        ("/workerGroups/0/probes/readinessProbe", "httpGet"),
    ),
    "a probe of two things": (
        {"head": {"probes": {"livenessProbe": {"tcpSocket": {"port": 1}, "exec": {"command": ["a"]}}}}},
        ("/head/probes/livenessProbe",),
    ),
    "a pod that is alive only after two answers": (
        group(probes={"livenessProbe": {"tcpSocket": {"port": 1}, "successThreshold": 2}}),
        ("/probes/livenessProbe/successThreshold",),
    ),
    "time to end for a pod that is only not ready": (
        group(probes={"readinessProbe": {"tcpSocket": {"port": 1}, "terminationGracePeriodSeconds": 5}}),
        ("/probes/readinessProbe",),
    ),
    "a variable of two sources": (
        {"pods": {"env": [{"name": "A", "value": "1", "valueFrom": {"secretKeyRef": {}}}]}},
        ("/pods/env/0",),
    ),
    "a toleration of every value that names one": (
        group(tolerations=[{"key": "a", "operator": "Exists", "value": "b"}]),
        ("/workerGroups/0/tolerations/0/value",),
    ),
    "a toleration of a value of no key": (
        {"head": {"tolerations": [{"value": "b", "effect": "NoSchedule"}]}},
        ("/head/tolerations/0", "key"),
    ),
    "a toleration for a while of what evicts nobody": (
        group(
            tolerations=[{"key": "a", "operator": "Exists", "effect": "NoSchedule", "tolerationSeconds": 9}]
        ),
        ("/workerGroups/0/tolerations/0/effect",),
    ),
    "domains that there must be of a spread that need not be": (
        group(topologySpreadConstraints=[{"topologyKey": "zone", "minDomains": 2}]),
        ("/topologySpreadConstraints/0", "whenUnsatisfiable"),
    ),
    # The API server takes it only of pods that name their operating system; Ray drains at SIGTERM.
    "another signal to stop": ({"pods": {"lifecycle": {"stopSignal": "SIGINT"}}}, ("stopSignal",)),
    "a hook of nothing": ({"pods": {"lifecycle": {"preStop": {}}}}, ("/pods/lifecycle/preStop",)),
    "a hook that there is not": ({"pods": {"lifecycle": {"preStart": {}}}}, ("/pods/lifecycle", "preStart")),
    "an environment of no source": (
        {"pods": {"envFrom": [{"configMap": {"name": "a"}}]}},
        ("/pods/envFrom/0", "configMap"),
    ),
    "a mount where another is": (
        merged(
            group(volumes=VOLUME, volumeMounts=[{"name": "own", "mountPath": "/data/"}]),
            {"pods": {"volumes": [{"name": "all"}], "volumeMounts": [{"name": "all", "mountPath": "/data"}]}},
        ),
        ("workerGroups[0] (cpu)", "two volumeMounts", "/data"),
    ),
    "a mount where the chart has one": (
        group(volumes=VOLUME, volumeMounts=[{"name": "own", "mountPath": "/tmp"}]),
        ("workerGroups[0] (cpu)", "two volumeMounts", "/tmp"),
    ),
    "a mount over the models": (
        merged(MODELS, group(volumes=VOLUME, volumeMounts=[{"name": "own", "mountPath": "/models"}])),
        ("workerGroups[0] (cpu)", "two volumeMounts", "/models"),
    ),
    "a drafter on a volume that is not mounted": (
        {"config": {"drafters": [{**ON_VOLUME, "path": "/models/small"}]}},
        ("config.drafters[0].path", "/models/small", "models.source"),
    ),
    "an adapter on a volume that is not mounted": (
        {"config": {"target": {"adapters": [{"name": "sql", "path": "/models/sql"}]}}},
        ("config.target.adapters[0].path", "/models/sql", "models.source"),
    ),
    "a mount of no volume": (
        group(volumeMounts=[{"name": "own", "mountPath": "/data"}]),
        ("workerGroups[0] (cpu)", '"own"', "/data", "the volumes are: tmp"),
    ),
    "a mount in all pods of a volume that one group has": (
        merged(group(volumes=VOLUME), {"pods": {"volumeMounts": [{"name": "own", "mountPath": "/data"}]}}),
        ("head", '"own"', "/data"),
    ),
    "a volume of all pods and of the group": (
        merged(group(volumes=VOLUME), {"pods": {"volumes": VOLUME}}),
        ("workerGroups[0] (cpu)", "two volumes", "own"),
    ),
    "a volume named as the autoscaler's": (
        {"pods": {"volumes": [{"name": "autoscaler-tmp"}]}},
        ("/pods/volumes/0/name",),
    ),
    "the same spread twice": (
        group(topologySpreadConstraints=[{"topologyKey": "zone"}, {"topologyKey": "zone", "maxSkew": 2}]),
        ("workerGroups[0] (cpu)", "topologySpreadConstraints", "zone"),
    ),
    "the same registry's credentials twice": (
        {"image": {"pullSecrets": ["a", "a"]}},
        ("/image/pullSecrets",),
    ),
    "a group called as the head": (group(name="head"), ("workerGroups[0] (head)",)),
    "a group called as the operator calls the head": (group(name="headgroup"), ("workerGroups[0]",)),
    "more CPU asked for than allowed": (
        group(resources={"requests": {"cpu": "1500m"}, "limits": {"cpu": 1}}),
        ("workerGroups[0] (cpu)", "resources.requests.cpu 1500m", "limit 1"),
    ),
    "more memory asked for than allowed": (
        {"head": {"resources": {"requests": {"memory": "4Gi"}, "limits": {"memory": "4G"}}}},
        ("head", "resources.requests.memory 4Gi", "limit 4G"),
    ),
    "more asked for by downloads than allowed": (
        {"models": {"downloadResources": {"requests": {"memory": "5Gi"}}}},
        ("models: downloadResources.requests.memory 5Gi", "limit 4Gi"),
    ),
    "more room for downloads asked for, by the volume's size, than allowed": (
        {"models": {**DOWNLOAD, "downloadResources": {"limits": {"ephemeral-storage": "50Gi"}}}},
        ("workerGroups[0] (cpu), models: downloadResources.requests.ephemeral-storage 100Gi", "limit 50Gi"),
    ),
    "more asked for beside the head than allowed": (
        {"autoscaler": {"resources": {"requests": {"cpu": "2"}}}},
        ("autoscaler", "resources.requests.cpu 2", "limit 1"),
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


@pytest.mark.parametrize(
    ("request_", "limit"),
    [
        ("1", "1000m"),
        (0.5, "500m"),
        ("1024Mi", "1Gi"),
        ("1.5Gi", "1536Mi"),
        ("999M", "1G"),
        (1_000_000, "1M"),
    ],
)
def test_a_request_of_the_limit_is_taken_in_whatever_unit(request_: object, limit: object) -> None:
    limits = {"cpu": 1, "memory": limit}
    assert files(group(resources={"requests": {"memory": request_}, "limits": limits}))


def test_what_is_refused_of_probes_and_tolerations_is_refused_for_that_alone() -> None:
    probe = {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 3}
    probes = {
        "readinessProbe": {**probe, "successThreshold": 2},
        "startupProbe": probe,
        "livenessProbe": probe,
    }
    tolerations = [
        {"operator": "Exists"},
        {"key": "a", "value": "b", "effect": "NoSchedule"},
        {"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 9},
    ]
    spread = [{"topologyKey": "zone", "minDomains": 2, "whenUnsatisfiable": "DoNotSchedule"}]
    assert files(group(probes=probes, tolerations=tolerations, topologySpreadConstraints=spread))


def test_a_limit_of_room_for_downloads_that_holds_the_volume_is_taken() -> None:
    limits = {"limits": {"ephemeral-storage": "200Gi"}}
    assert files({"models": {**DOWNLOAD, "downloadResources": limits}})


def test_models_may_be_on_a_volume_of_ones_own() -> None:
    """Such as one of a CSI driver, which is no claim."""
    config = {"target": {"path": "/models/large"}, "drafters": [{**ON_VOLUME, "path": "/models/small"}]}
    mounted = {"volumes": VOLUME, "volumeMounts": [{"name": "own", "mountPath": "/models"}]}
    assert files({"config": config, "pods": mounted})
    assert files(merged(group(**mounted), {"config": config}))


def test_what_is_refused_of_mounts_is_refused_for_that_alone() -> None:
    own = {"volumes": VOLUME, "volumeMounts": [{"name": "own", "mountPath": "/data"}]}
    assert files(merged(MODELS, group(**own), {"pods": {"volumes": [{"name": "all", "emptyDir": {}}]}}))
    spread = [{"topologyKey": "zone"}, {"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]
    assert files(group(topologySpreadConstraints=spread))
