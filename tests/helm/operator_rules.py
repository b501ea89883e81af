"""What the KubeRay operator checks of a RayService beyond its CRD, and when it makes a second cluster.

After KubeRay 1.7's validation and its hash of `rayClusterConfig`, written anew.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
MAX_NAME = 47
_QUOTES = "'\"` "
_OF_REDIS = {"REDIS_PASSWORD", "RAY_REDIS_ADDRESS"}
#: What the head may not have in its environment, whatever else is configured.
_NEVER_IN_ENV = {"REDIS_USERNAME", "RAY_enable_autoscaler_v2"}
_OLDEST_WITH_TOKENS = (2, 52)

Object = dict[str, Any]


def violations(service: Object) -> list[str]:
    """What the operator would refuse."""
    spec = service["spec"]
    ray = spec["rayClusterConfig"]
    return [
        *_of_name("metadata.name", service["metadata"]["name"]),
        *_of_head(ray["headGroupSpec"], ray),
        *_of_group("head", ray["headGroupSpec"], ray),
        *(found for group in ray.get("workerGroupSpecs", []) for found in _of_worker(group, ray)),
        *_of_upgrade(spec, ray),
    ]


def _of_name(where: str, name: str) -> Iterator[str]:
    if len(name) > MAX_NAME:
        yield f"{where} {name} is longer than {MAX_NAME}"
    if not DNS_1035.fullmatch(name):
        yield f"{where} {name} is no DNS-1035 label"


def _of_head(head: Object, ray: Object) -> Iterator[str]:
    env = {variable["name"] for variable in head["template"]["spec"]["containers"][0].get("env", [])}
    refused = _NEVER_IN_ENV | (set() if "gcsFaultToleranceOptions" in ray else {"RAY_REDIS_ADDRESS"})
    if env & refused or "redis-username" in head.get("rayStartParams", {}):
        yield f"head: {env & refused or 'redis-username'} is the operator's"
    version = tuple(int(part) for part in ray["rayVersion"].split(".")[:2])
    if ray.get("authOptions", {}).get("mode") == "token" and version < _OLDEST_WITH_TOKENS:
        yield f"authOptions.mode token with Ray {ray['rayVersion']}"


def _of_group(name: str, group: Object, ray: Object) -> Iterator[str]:
    pod, params = group["template"]["spec"], group.get("rayStartParams", {})
    if not pod.get("containers"):
        yield f"{name}: no container"
    if "labels" in params:
        yield f"{name}: rayStartParams.labels"
    yield from _of_resources(name, params)
    if group.get("resources") and {"num-cpus", "num-gpus", "memory", "resources"} & set(params):
        yield f"{name}: resources both in rayStartParams and in resources"
    options = ray.get("autoscalerOptions", {})
    if (
        ray.get("enableInTreeAutoscaling")
        and options.get("version") == "v2"
        and pod.get("restartPolicy") not in (None, "", "Never")
    ):
        yield f"{name}: restartPolicy {pod['restartPolicy']} with autoscaler v2"
    if "gcsFaultToleranceOptions" in ray:
        env = {variable["name"] for one in pod["containers"] for variable in one.get("env", [])}
        if env & _OF_REDIS or "redis-password" in params:
            yield f"{name}: Redis both in gcsFaultToleranceOptions and in {env & _OF_REDIS}"


def read_resources(params: Object) -> dict[str, float]:
    """Ray's custom resources as the operator reads them, to add those of accelerators.

    Raises:
        ValueError: if it cannot read them; it logs that then, and adds no accelerators, GPUs among them.
    """
    found = json.loads(params.get("resources", "{}").strip(_QUOTES))
    if not isinstance(found, dict) or not all(isinstance(amount, int | float) for amount in found.values()):
        raise ValueError(f"no numbers by name: {found}")
    return found


def start_arguments(params: Object) -> list[str]:
    """What `ray start` sees of the parameters: the operator writes them into a shell's command line."""
    return shlex.split(" ".join(f"--{name}={value}" for name, value in sorted(params.items())))


def _of_resources(name: str, params: Object) -> Iterator[str]:
    try:
        found = read_resources(params)
    except ValueError as error:
        yield f"{name}: rayStartParams.resources cannot be read: {error}"
        return
    for argument in start_arguments(params):
        option, _, value = argument.partition("=")
        if option == "--resources" and json.loads(value) != found:
            yield f"{name}: a shell passes {value} on for rayStartParams.resources"


def _of_worker(group: Object, ray: Object) -> Iterator[str]:
    name = group["groupName"]
    yield from _of_group(name, group, ray)
    if "idleTimeoutSeconds" in group and ray.get("autoscalerOptions", {}).get("version") != "v2":
        yield f"{name}: idleTimeoutSeconds without autoscaler v2"
    low, high = group.get("minReplicas"), group.get("maxReplicas")
    if low is None or high is None:
        yield f"{name}: minReplicas and maxReplicas must be set"
    elif not low <= group.get("replicas", low) <= high:
        yield f"{name}: replicas out of bounds"


def _of_upgrade(spec: Object, ray: Object) -> Iterator[str]:
    strategy = spec.get("upgradeStrategy", {})
    if strategy.get("type") == "NewClusterWithIncrementalUpgrade":
        options = strategy.get("clusterUpgradeOptions", {})
        if not ray.get("enableInTreeAutoscaling"):
            yield "incremental upgrade without autoscaler"
        if not options.get("gatewayClassName"):
            yield "incremental upgrade without gatewayClassName"
        if not 0 < options.get("stepSizePercent", 0) <= options.get("maxSurgePercent", 100) <= 100:
            yield "incremental upgrade: stepSizePercent"
    if spec["rayClusterConfig"].get("authOptions", {}).get("enableK8sTokenAuth"):
        yield "enableK8sTokenAuth"
    if spec["rayClusterConfig"]["headGroupSpec"].get("headService", {}).get("metadata", {}).get("name"):
        yield "headService has a name"


def cluster_hash(ray: Object, num_groups: int | None = None) -> str:
    """Equal for two configurations between which no second cluster is made.

    Args:
        ray: `rayClusterConfig`.
        num_groups: how many worker groups the running cluster has; those added behind them do not count.
    """
    counted = copy.deepcopy(ray)
    counted.pop("upgradeStrategy", None)
    counted["workerGroupSpecs"] = counted["workerGroupSpecs"][:num_groups]
    for group in counted["workerGroupSpecs"]:
        for field in ("replicas", "minReplicas", "maxReplicas"):
            group.pop(field, None)
        group.get("scaleStrategy", {}).pop("workersToDelete", None)
    return hashlib.sha1(json.dumps(counted, sort_keys=True).encode()).hexdigest()
