"""Values that are wrong are refused before anything reaches a cluster, by a message that names them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.rendered_chart import files, gpu_group, group, helm, merged, refusal

GPU_GROUP = group(gpu={"count": 1})
ZEROES = "0" * 40
HASH = f"hmac-sha256:{'0' * 32}:{'0' * 64}"

INCREMENTAL = {
    "upgrade": {"type": "NewClusterWithIncrementalUpgrade", "incremental": {"gatewayClassName": "a"}},
    "tests": {"enabled": False},
}


def resources(**changes: Any) -> dict[str, Any]:
    return {"requests": {"cpu": "1"}, "limits": {"cpu": "1"}, **changes}


def shared_gpu(of_target: float, of_drafter: float, **drafter: Any) -> dict[str, Any]:
    placement = {"num_gpus": of_drafter, "collocate": "target"}
    return {
        "target": {"placement": {"num_gpus": of_target}},
        "drafters": [{"kind": "model", "name": "small", "path": "zoo:a", "placement": placement, **drafter}],
    }


#: By name: values, and what the message must say.
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "an unknown value": ({"replicaCount": 2}, ("replicaCount",)),
    "an unknown value within a section": ({"service": {"prot": 80}}, ("/service", "prot")),
    # With null Helm takes a default away.
    "no authentication, by taking the default away": ({"rayAuthentication": None}, ("rayAuthentication",)),
    "no section, by taking its defaults away": ({"pods": None}, ("missing property 'pods'",)),
    "a name of the chart that is no label": (
        {"nameOverride": "my flotilla!", "fullnameOverride": "a"},
        ("/nameOverride",),
    ),
    "a name above 47 characters": ({"fullnameOverride": "a" * 48}, ("/fullnameOverride", "47")),
    "a name that begins with a digit": ({"fullnameOverride": "1a"}, ("/fullnameOverride",)),
    # -- configuration
    "a configuration without target": ({"config": {"target": None}}, ("/config", "target")),
    "an unknown field of the configuration": ({"config": {"polcy": {}}}, ("/config", "polcy")),
    "an unknown field deep in it": (
        {"config": {"target": {"tensor_paralel": 2}}},
        ("/config/target", "tensor_paralel"),
    ),
    "a number out of its bounds": (
        {"config": {"target": {"tensor_parallel": 0}}},
        ("/config/target/tensor_parallel",),
    ),
    "a dtype that there is not": ({"config": {"target": {"dtype": "int4"}}}, ("/config/target/dtype",)),
    "a drafter of no kind": ({"config": {"drafters": [{"kind": "oracle"}]}}, ("/config/drafters/0",)),
    "a lookup that Ray may start on the head": (
        {"config": {"drafters": [{"kind": "prompt_lookup"}]}},
        ("config.drafters[0]", "prompt_lookup", "placement"),
    ),
    "a model that Ray may start on the head": (
        {"config": {"drafters": [{"kind": "model", "name": "small", "path": "zoo:a"}]}},
        ("config.drafters[0]", "small", "placement"),
    ),
    "text in place of a number": (
        {"config": {"policy": {"max_depth": "deep"}}},
        ("/config/policy/max_depth",),
    ),
    "a policy that there is not": ({"config": {"policy": {"name": "flotila"}}}, ("/config/policy/name",)),
    "a selector that there is not": ({"config": {"selector": {"name": "best"}}}, ("/config/selector/name",)),
    "a batching rule that there is not": (
        {"config": {"scheduler": {"batching": "lifo"}}},
        ("/config/scheduler/batching", "sarathi"),
    ),
    "a tier downgraded to one that there is not": (
        {"config": {"tiers": {"fast": {"downgrade_to": "slow"}, "batch": {}}}},
        ("config.tiers.fast.downgrade_to", "slow", "batch"),
    ),
    "front ends that listen themselves": (
        {"config": {"http": {"direct": True}}},
        ("config.http.direct", "false"),
    ),
    "another port of pods": ({"config": {"http": {"port": 80}}}, ("config.http.port", "8000", "ingress")),
    "a port of metrics": ({"config": {"metrics": {"port": 9100}}}, ("config.metrics.port",)),
    "administration over HTTP without keys": (
        {"config": {"http": {"admin": True}}},
        ("config.http.admin", "apiKeys.enabled"),
    ),
    "TLS in pods": (
        {"config": {"http": {"tls_certificate": "/c"}}},
        ("config.http.tls_certificate", "ingress"),
    ),
    "a keys file beside apiKeys": (
        {"config": {"security": {"keys_file": "/k"}}},
        ("config.security.keys_file", "apiKeys"),
    ),
    "more GPUs than the groups have": (
        {
            "config": {
                "target": {"tensor_parallel": 4, "placement": {"num_gpus": 1}},
                "drafters": [],
            },
            **GPU_GROUP,
        },
        ("4 GPUs", "at most 2"),
    ),
    "more cells than fit": (
        {"config": {**shared_gpu(0.8, 0.2), "scaling": {"cells": {"max": 3}}}, **GPU_GROUP},
        ("3 GPUs", "3 cells"),
    ),
    "a drafter on the target's GPU without a share of it": (
        merged(GPU_GROUP, {"config": {"target": {"placement": {"num_gpus": 1}}}}),
        ("config.drafters[0]", "code-2x128", "no share", "placement.num_gpus"),
    ),
    "a share beside a whole GPU, which Ray makes two": (
        merged(group(gpu={"count": 1}, maxReplicas=1), {"config": shared_gpu(1, 0.2)}),
        ("2 GPUs", "at most 1"),
    ),
    # -- image
    "no tag": ({"image": {"tag": None}}, ("/image", "tag")),
    "the tag latest": ({"image": {"tag": "latest"}}, ("/image/tag",)),
    "a digest that is none": ({"image": {"digest": "sha256:abc"}}, ("/image/digest",)),
    "a pull policy that there is not": ({"image": {"pullPolicy": "Sometimes"}}, ("/image/pullPolicy",)),
    "a Ray that is too old": ({"rayVersion": "1.13.0"}, ("/rayVersion",)),
    "a Ray that has no tokens, and that Flotilla does not run on": (
        {"rayVersion": "2.51.0"},
        ("/rayVersion",),
    ),
    "an authentication that there is not": ({"rayAuthentication": "none"}, ("/rayAuthentication",)),
    # -- worker groups
    "no worker group": ({"workerGroups": []}, ("/workerGroups",)),
    "a group without a name": (group(name=None), ("/workerGroups/0", "name")),
    "a group without resources": (group(resources=None), ("/workerGroups/0", "resources")),
    "a group's resources without limits": (
        group(resources={"requests": {}}),
        ("/workerGroups/0/resources", "limits"),
    ),
    "a group's name with capitals": (group(name="GPU"), ("/workerGroups/0/name",)),
    "two groups of one name": (
        {"workerGroups": [*group()["workerGroups"], *group()["workerGroups"]]},
        ("workerGroups[1]", "cpu"),
    ),
    "minReplicas above maxReplicas": (
        group(minReplicas=3),
        ("workerGroups[0]", "minReplicas 3", "maxReplicas 2"),
    ),
    "replicas above maxReplicas": (group(replicas=3), ("replicas 3", "maxReplicas 2")),
    "replicas below minReplicas": (group(replicas=0), ("replicas 0", "minReplicas 1")),
    "negative replicas": (group(minReplicas=-1), ("/workerGroups/0/minReplicas",)),
    "a quantity that is none": (
        group(resources=resources(limits={"memory": "4 GB"})),
        ("/resources/limits/memory",),
    ),
    "half a GPU of a pod": (group(gpu={"count": 0.5}), ("/workerGroups/0/gpu/count",)),
    "a toleration of no effect": (group(tolerations=[{"effect": "Never"}]), ("/tolerations/0/effect",)),
    "a topology spread without key": (group(topologySpreadConstraints=[{"maxSkew": 1}]), ("topologyKey",)),
    "an empty disruption budget": (group(podDisruptionBudget={}), ("/podDisruptionBudget",)),
    "a disruption budget that Kubernetes cannot compute for a RayCluster": (
        group(podDisruptionBudget={"maxUnavailable": 1}),
        ("/podDisruptionBudget", "maxUnavailable"),
    ),
    "a share of pods that Kubernetes cannot count": (
        group(podDisruptionBudget={"minAvailable": "50%"}),
        ("/podDisruptionBudget/minAvailable",),
    ),
    "a disruption budget of more pods than there may be": (
        group(podDisruptionBudget={"minAvailable": 2}),
        ("workerGroups[0]", "minAvailable 2", "minReplicas 1"),
    ),
    "labels among the start parameters": (
        group(rayStartParams={"labels": "a=b"}),
        ("rayStartParams.labels", "rayLabels"),
    ),
    "Ray resources among the start parameters, where the chart's would be lost": (
        group(rayStartParams={"resources": "{}"}),
        ("rayStartParams.resources", "rayResources"),
    ),
    "Ray's own resources among rayResources": (group(rayResources={"GPU": 1}), ("/rayResources", "GPU")),
    "the chart's own resources among rayResources": (
        group(rayResources={"flotilla-cell": 1}),
        ("/rayResources", "flotilla-cell"),
    ),
    "no pods for cells": (group(runs=["front-ends"]), ("workerGroups", "cells")),
    "no pods for front ends": (group(runs=["cells"]), ("workerGroups", "front-ends")),
    "a group that runs what there is not": (group(runs=["target"]), ("/workerGroups/0/runs/0",)),
    "Ray's own labels among rayLabels": (
        group(rayLabels={"ray.io/node-id": "a"}),
        ("/rayLabels", "ray.io/node-id"),
    ),
    "a volume named as one of ours": (
        group(volumes=[{"name": "models"}]),
        ("/workerGroups/0/volumes/0/name",),
    ),
    "a probe of an unknown field": (
        group(probes={"readinessProbe": {"period": 3}}),
        ("/probes/readinessProbe", "period"),
    ),
    "an object store that Ray refuses": ({"pods": {"objectStoreMemory": 1}}, ("/pods/objectStoreMemory",)),
    # -- models and keys
    "a source of models that there is not": ({"models": {"source": "s3"}}, ("/models/source",)),
    "a volume without claim": ({"models": {"source": "pvc"}}, ("models.pvc.claimName",)),
    "a download of nothing": ({"models": {"source": "download"}}, ("models.download",)),
    "a download without a commit": (
        {
            "models": {
                "source": "download",
                "download": [{"repository": "a/b", "directory": "a", "revision": "main"}],
            }
        },
        ("/models/download/0/revision",),
    ),
    "a download that is not asked for": (
        {"models": {"download": [{"repository": "a/b", "directory": "a", "revision": ZEROES}]}},
        ("models.download", "none"),
    ),
    "a model on a volume that is not mounted": (
        {"config": {"target": {"path": "/models/a"}}},
        ("config.target.path", "/models/a", "models.source"),
    ),
    "keys from nowhere": ({"apiKeys": {"enabled": True}}, ("apiKeys.existingSecret", "apiKeys.keys")),
    "keys from two places": (
        {"apiKeys": {"enabled": True, "existingSecret": "a", "keys": [{"name": "a", "hash": HASH}]}},
        ("apiKeys.existingSecret", "apiKeys.keys"),
    ),
    "keys that nobody is asked for": (
        {"apiKeys": {"keys": [{"name": "a", "hash": HASH}]}},
        ("apiKeys.enabled",),
    ),
    "a key in place of its hash": (
        {"apiKeys": {"enabled": True, "keys": [{"name": "a", "hash": "sk-1"}]}},
        ("/apiKeys/keys/0/hash",),
    ),
    "a monitor without key": (
        {
            "apiKeys": {"enabled": True, "existingSecret": "a"},
            "monitoring": {"podMonitor": {"enabled": True}},
        },
        ("monitoring.podMonitor.authorization.secretName", "apiKeys.client.secretName"),
    ),
    "a monitor's key where nobody is asked for one": (
        {"monitoring": {"podMonitor": {"authorization": {"secretName": "a"}}}},
        ("monitoring.podMonitor.authorization", "apiKeys.enabled"),
    ),
    # -- the rest
    "a service of no type": ({"service": {"type": "External"}}, ("/service/type",)),
    "a port of the Service, which the operator would ignore": (
        {"service": {"port": 80}},
        ("/service", "port"),
    ),
    "the autoscaler's version in the environment": (
        {"head": {"env": [{"name": "RAY_enable_autoscaler_v2", "value": "1"}]}},
        ("RAY_enable_autoscaler_v2", "autoscaler.enabled"),
    ),
    "a time until idle pods are removed, by nobody": (
        merged(group(idleTimeoutSeconds=60), {"autoscaler": {"enabled": False}}),
        ("workerGroups[0]", "idleTimeoutSeconds", "autoscaler.enabled"),
    ),
    "an autoscaler of no speed": ({"autoscaler": {"upscalingMode": "Fast"}}, ("/autoscaler/upscalingMode",)),
    "Redis without address": ({"gcsFaultTolerance": {"enabled": True}}, ("gcsFaultTolerance.redisAddress",)),
    "an address without port": (
        {"gcsFaultTolerance": {"redisAddress": "redis"}},
        ("/gcsFaultTolerance/redisAddress",),
    ),
    "Redis in the environment, too": (
        {
            "gcsFaultTolerance": {"enabled": True, "redisAddress": "redis:6379"},
            "pods": {"env": [{"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"}]},
        },
        ("RAY_REDIS_ADDRESS", "gcsFaultTolerance"),
    ),
    "Redis in the environment alone": (
        {"pods": {"env": [{"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"}]}},
        ("RAY_REDIS_ADDRESS", "gcsFaultTolerance"),
    ),
    "a name for Redis among the start parameters alone": (
        {"head": {"rayStartParams": {"redis-username": "a"}}},
        ("head.rayStartParams.redis-username", "gcsFaultTolerance.redisUsername"),
    ),
    "a name for Redis without password": (
        {"gcsFaultTolerance": {"enabled": True, "redisAddress": "redis:6379", "redisUsername": "a"}},
        ("gcsFaultTolerance.redisUsername", "redisPassword"),
    ),
    "a name for Redis among the start parameters": (
        {
            "gcsFaultTolerance": {"enabled": True, "redisAddress": "redis:6379"},
            "head": {"rayStartParams": {"redis-username": "a"}},
        },
        ("head.rayStartParams.redis-username", "gcsFaultTolerance.redisUsername"),
    ),
    "Redis' password among the start parameters": (
        {
            "gcsFaultTolerance": {"enabled": True, "redisAddress": "redis:6379"},
            "head": {"rayStartParams": {"redis-password": "a"}},
        },
        ("head.rayStartParams.redis-password",),
    ),
    "an upgrade of no type": ({"upgrade": {"type": "Rolling"}}, ("/upgrade/type",)),
    "an incremental upgrade without gateway": (
        {"upgrade": {"type": "NewClusterWithIncrementalUpgrade"}},
        ("upgrade.incremental.gatewayClassName",),
    ),
    "an incremental upgrade without autoscaler": (
        merged(INCREMENTAL, {"autoscaler": {"enabled": False}}),
        ("upgrade.type", "autoscaler.enabled"),
    ),
    "steps above the surge": (
        merged(INCREMENTAL, {"upgrade": {"incremental": {"stepSizePercent": 50, "maxSurgePercent": 20}}}),
        ("stepSizePercent 50", "maxSurgePercent 20"),
    ),
    "an Ingress to a Service that an incremental upgrade does not have": (
        merged(INCREMENTAL, {"ingress": {"enabled": True}}),
        ("ingress.enabled", "upgrade.type", "Gateway"),
    ),
    "a route to a Service that an incremental upgrade does not have": (
        merged(INCREMENTAL, {"httpRoute": {"enabled": True, "parentRefs": [{"name": "a"}]}}),
        ("httpRoute.enabled", "upgrade.type", "Gateway"),
    ),
    "a test of a Service that an incremental upgrade does not have": (
        merged(INCREMENTAL, {"tests": {"enabled": True}}),
        ("tests.enabled", "upgrade.type", "Gateway"),
    ),
    "a type of a Service that an incremental upgrade does not have": (
        merged(INCREMENTAL, {"service": {"type": "LoadBalancer"}}),
        ("service.type", "upgrade.type"),
    ),
    "a share above 100": ({"upgrade": {"incremental": {"maxSurgePercent": 120}}}, ("/maxSurgePercent",)),
    "a route to nowhere": ({"httpRoute": {"enabled": True}}, ("httpRoute.parentRefs",)),
    "a certificate of no host": ({"ingress": {"tlsSecretName": "a"}}, ("ingress.host",)),
    "a target whose budget no burn rate exhausts": (
        {"monitoring": {"rules": {"sloTarget": 0.9}}},
        ("/monitoring/rules/sloTarget",),
    ),
    "a target of a tier that there is not": (
        {"monitoring": {"rules": {"tierTargets": {"fast": 0.99}}}},
        ("monitoring.rules.tierTargets", "fast"),
    ),
    "a place of runbooks that is no address": (
        {"monitoring": {"rules": {"runbookBaseUrl": "docs"}}},
        ("/monitoring/rules/runbookBaseUrl",),
    ),
    "scrapes that take longer than the time between them": (
        {"monitoring": {"podMonitor": {"interval": "1m", "scrapeTimeout": "61s"}}},
        ("monitoring.podMonitor.scrapeTimeout 61s", "interval 1m"),
    ),
    "scrapes so rare that rates over 5 minutes have gaps": (
        {"monitoring": {"podMonitor": {"enabled": True, "interval": "3m"}, "rules": {"enabled": True}}},
        ("monitoring.podMonitor.interval 3m", "monitoring.rules.enabled", "2m"),
    ),
    "a label that alerts have": (
        {"monitoring": {"rules": {"enabled": True, "alertLabels": {"severity": "info"}}}},
        ("monitoring.rules.alertLabels", "severity"),
    ),
    "a label of alerts that is no label": (
        {"monitoring": {"rules": {"alertLabels": {"a-b": "c"}}}},
        ("/monitoring/rules/alertLabels", "a-b"),
    ),
    "nobody to ask for addresses": (
        {"networkPolicy": {"egress": {"dns": {"peers": []}}}},
        ("/networkPolicy/egress/dns/peers",),
    ),
    "a job that ends its selector": (
        {"monitoring": {"rules": {"job": 'a"} or {job="b'}}},
        ("/monitoring/rules/job",),
    ),
    "an interval of no unit": (
        {"monitoring": {"podMonitor": {"interval": "15"}}},
        ("/monitoring/podMonitor/interval",),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name(name: str) -> None:
    values, named = REFUSED[name]
    message = refusal(values)
    for part in named:
        assert part in message


@pytest.mark.parametrize("release", ["1demo", "2024"])
def test_a_release_that_makes_no_name_is_refused(release: str) -> None:
    with pytest.raises(helm.HelmError, match="must begin with a letter"):
        files(name=release)


def test_what_is_refused_is_refused_for_that_alone() -> None:
    assert files(gpu_group())
    for kind in ("heads", "eagle"):  # in the target's process: they reserve nothing of their own
        assert files({"config": {"drafters": [{"kind": kind, "path": "zoo:a"}]}})
    one_gpu = group(gpu={"count": 1}, maxReplicas=1)
    for shares in ((0.8, 0.2), (0.7, 0.3), (0.9, 0.1)):
        assert files(merged(one_gpu, {"config": shared_gpu(*shares)}))
    assert files(merged(one_gpu, {"config": shared_gpu(1, 0, device="cpu")}))
    assert files(INCREMENTAL)
    rare = {"enabled": True, "interval": "2m"}
    assert files({"monitoring": {"podMonitor": rare, "rules": {"enabled": True}}})
    assert files(merged(group(), {"fullnameOverride": "a" * 47}))
