"""What single values do: one behaviour each."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.security_config import KeysFile
from tests.helm.operator_rules import read_resources
from tests.helm.rendered_chart import (
    cluster,
    container,
    flotilla_args,
    gpu_group,
    group,
    merged,
    notes,
    of_kind,
    ray_service,
    serve_config,
    templates,
    worker,
)

HASH = f"hmac-sha256:{'0' * 32}:{'0' * 64}"
KEYS = {"apiKeys": {"enabled": True, "existingSecret": "keys", "client": {"secretName": "client"}}}


def first_group(values: dict[str, Any]) -> dict[str, Any]:
    return dict(cluster(values)["workerGroupSpecs"][0])


def ray_resources(values: dict[str, Any]) -> dict[str, float]:
    """Of the first group."""
    return read_resources(first_group(values)["rayStartParams"])


def env(values: dict[str, Any] | None = None) -> dict[str, Any]:
    return {variable["name"]: variable.get("value") for variable in container(values)["env"]}


# -- names ---------------------------------------------------------------------------------------------


def test_the_release_names_the_service() -> None:
    assert ray_service(name="prod")["metadata"]["name"] == "prod-flotilla"


def test_a_release_called_flotilla_is_not_named_twice() -> None:
    assert ray_service(name="flotilla")["metadata"]["name"] == "flotilla"


def test_the_whole_name_may_be_given() -> None:
    assert ray_service({"fullnameOverride": "llm"})["metadata"]["name"] == "llm"


# -- configuration -------------------------------------------------------------------------------------


def test_front_ends_are_behind_serves_proxy() -> None:
    http = flotilla_args()["http"]
    assert (http["host"], http["port"], http["direct"]) == ("0.0.0.0", 8000, False)


def test_the_proxy_is_on_every_node() -> None:
    assert serve_config()["proxy_location"] == "EveryNode"


def test_a_cluster_takes_traffic_only_once_it_serves() -> None:
    assert flotilla_args()["scaling"]["cells"]["await_ready"] is True


@pytest.mark.parametrize("slots", [1_000_000, 1_048_576, 10_000_000, 123_456_789])
def test_large_numbers_stay_integers(slots: int) -> None:
    found = flotilla_args({"config": {"target": {"num_slots": slots}}})["target"]["num_slots"]
    assert (found, type(found)) == (slots, int)


def test_numbers_with_a_fraction_stay_as_they_are() -> None:
    assert flotilla_args({"config": {"policy": {"miss_probability": 0.1}}})["policy"] == {
        "miss_probability": 0.1
    }


def test_text_that_looks_like_a_number_stays_text() -> None:
    assert flotilla_args({"config": {"target": {"served_name": "1e3"}}})["target"]["served_name"] == "1e3"


def test_tiers_are_passed_on() -> None:
    tiers = {"fast": {"tpot_ms": "1.2x", "downgrade_to": "slow"}, "slow": {"priority": 1}}
    assert flotilla_args({"config": {"tiers": tiers}})["tiers"] == tiers


def test_no_grpc_unless_asked_for() -> None:
    assert "grpc_options" not in serve_config()
    assert not of_kind("Service")


def test_grpc_has_a_service_of_its_own() -> None:
    (service,) = of_kind("Service", {"config": {"grpc": {"enabled": True}}})
    assert service["spec"]["ports"][0]["port"] == 9000
    assert service["spec"]["selector"]["ray.io/serve"] == "true"


def test_a_load_balancer_for_grpc_is_as_internal_as_the_other() -> None:
    internal = {"service.beta.kubernetes.io/aws-load-balancer-internal": "true"}
    values = {
        "service": {"type": "LoadBalancer", "annotations": internal},
        "config": {"grpc": {"enabled": True}},
    }
    (grpc,) = of_kind("Service", values)
    http = ray_service(values)["spec"]["serveService"]
    assert grpc["spec"]["type"] == http["spec"]["type"] == "LoadBalancer"
    assert grpc["metadata"]["annotations"] == http["metadata"]["annotations"] == internal


# -- image and models ----------------------------------------------------------------------------------


def test_a_digest_wins_over_the_tag() -> None:
    digest = f"sha256:{'a' * 64}"
    assert container({"image": {"digest": digest}})["image"] == f"flotilla@{digest}"


def test_every_pod_has_the_same_image() -> None:
    images = {one["image"] for _, pod in templates(cluster()) for one in pod["spec"]["containers"]}
    assert images == {"flotilla:0.1.0"}


def test_registries_credentials_are_named() -> None:
    assert worker({"image": {"pullSecrets": ["a"]}})["imagePullSecrets"] == [{"name": "a"}]


def test_a_volume_with_models_is_mounted_read_only() -> None:
    values = {"models": {"source": "pvc", "pvc": {"claimName": "weights", "subPath": "a"}}}
    mounts = {mount["name"]: mount for mount in container(values)["volumeMounts"]}
    assert mounts["models"] == {"name": "models", "mountPath": "/models", "readOnly": True, "subPath": "a"}


DOWNLOAD = {
    "models": {
        "source": "download",
        "download": [{"repository": "a/b", "revision": "1" * 40, "directory": "target"}],
        "hubToken": {"secretName": "hub"},
    }
}


def test_downloads_run_before_ray_starts() -> None:
    assert [one["name"] for one in worker(DOWNLOAD)["initContainers"]] == ["download-0"]


def test_the_download_is_online_whatever_the_image_says() -> None:
    (download,) = worker(DOWNLOAD)["initContainers"]
    assert {"name": "HF_HUB_OFFLINE", "value": "0"} in download["env"]


def test_only_the_download_sees_the_hubs_token() -> None:
    (download,) = worker(DOWNLOAD)["initContainers"]
    assert any(variable["name"] == "HF_TOKEN" for variable in download["env"])
    assert "HF_TOKEN" not in env(DOWNLOAD)


def test_the_head_has_the_models_too() -> None:
    values = {"models": {"source": "pvc", "pvc": {"claimName": "weights"}}}
    head = dict(templates(cluster(values)))["head"]
    assert any(volume["name"] == "models" for volume in head["spec"]["volumes"])


def test_nothing_is_fetched_while_serving() -> None:
    assert env()["HF_HUB_OFFLINE"] == "1"


# -- API keys ------------------------------------------------------------------------------------------


def test_keys_are_mounted_as_a_directory_so_that_they_can_change() -> None:
    (mount,) = [mount for mount in container(KEYS)["volumeMounts"] if mount["name"] == "api-keys"]
    assert "subPath" not in mount
    security = flotilla_args(KEYS)["security"]
    assert security == {"keys_file": f"{mount['mountPath']}/keys.yaml", "require_keys": True}


def test_keys_in_the_values_become_a_file_that_flotilla_reads(tmp_path: Any) -> None:
    keys = [{"name": "team-a", "hash": HASH, "tiers": ["batch"], "limits": {"requests_per_minute": 60}}]
    (secret,) = of_kind("Secret", {"apiKeys": {"enabled": True, "keys": keys}})
    written = tmp_path / "keys.yaml"
    written.write_text(secret["stringData"]["keys.yaml"])
    (loaded,) = KeysFile.load(written).keys
    assert (loaded.name, loaded.tiers, loaded.limits.requests_per_minute) == ("team-a", ("batch",), 60)


def test_keys_may_open_the_administration() -> None:
    found = flotilla_args(merged(KEYS, {"config": {"http": {"admin": True}}}))
    assert (found["http"]["admin"], found["security"]["require_keys"]) == (True, True)


def test_a_secret_of_ones_own_is_not_made_again() -> None:
    assert not of_kind("Secret", KEYS)


def test_no_key_in_the_configuration() -> None:
    text = json.dumps(ray_service({"apiKeys": {"enabled": True, "keys": [{"name": "a", "hash": HASH}]}}))
    assert HASH not in text


def test_helm_test_and_prometheus_bring_a_key() -> None:
    values = merged(KEYS, {"monitoring": {"podMonitor": {"enabled": True}}})
    (pod,) = of_kind("Pod", values)
    (key,) = [one for one in pod["spec"]["containers"][0]["env"] if one["name"] == "API_KEY"]
    assert key["valueFrom"]["secretKeyRef"] == {"name": "client", "key": "api-key"}
    endpoint = of_kind("PodMonitor", values)[0]["spec"]["podMetricsEndpoints"][0]
    assert endpoint["authorization"]["credentials"] == {"name": "client", "key": "api-key"}


# -- worker groups -------------------------------------------------------------------------------------


def test_gpus_are_requested_and_limited_alike() -> None:
    resources = container(gpu_group(gpu={"count": 2}))["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == 2


def test_a_type_of_gpu_selects_nodes() -> None:
    assert worker(gpu_group(gpu={"count": 1, "type": "NVIDIA-L4"}))["nodeSelector"] == {
        "nvidia.com/gpu.product": "NVIDIA-L4"
    }


def test_gpus_of_another_maker() -> None:
    values = gpu_group(gpu={"count": 1, "resourceName": "amd.com/gpu"})
    assert container(values)["resources"]["limits"]["amd.com/gpu"] == 1
    assert worker(values)["tolerations"][0]["key"] == "amd.com/gpu"


def test_pods_with_gpus_tolerate_the_taint_of_their_nodes() -> None:
    tolerations = worker(gpu_group())["tolerations"]
    assert tolerations == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]


def test_pods_without_gpus_tolerate_nothing() -> None:
    assert "tolerations" not in worker(group())


def test_spread_is_counted_within_the_group() -> None:
    (spread,) = worker(group(topologySpreadConstraints=[{"topologyKey": "zone"}]))[
        "topologySpreadConstraints"
    ]
    assert spread["labelSelector"]["matchLabels"]["flotilla/group"] == "cpu"
    assert (spread["maxSkew"], spread["whenUnsatisfiable"]) == (1, "ScheduleAnyway")


def test_cells_and_front_ends_run_in_every_group_unless_it_says_otherwise() -> None:
    assert ray_resources(group()) == {"flotilla-cell": 1, "flotilla-front-end": 1}
    others = [{**group()["workerGroups"][0], "name": "others"}]
    for runs, found in (
        (["cells"], {"flotilla-cell": 1}),
        (["front-ends"], {"flotilla-front-end": 1}),
    ):
        assert ray_resources({"workerGroups": group(runs=runs)["workerGroups"] + others}) == found
    params = first_group({"workerGroups": group(runs=[])["workerGroups"] + others})["rayStartParams"]
    assert "resources" not in params


def test_cells_and_front_ends_ask_for_what_their_groups_have_and_keep_what_they_were_given() -> None:
    given = {"cells": {"max": 2}, "front_ends": {"max": 4, "placement": {"num_cpus": 1}}}
    scaling = flotilla_args(merged(group(), {"config": {"scaling": given}}))["scaling"]
    assert scaling["cells"]["placement"] == {"resources": {"flotilla-cell": 0.001}}
    assert scaling["front_ends"]["placement"] == {
        "num_cpus": 1,
        "resources": {"flotilla-front-end": 0.001},
    }
    assert (scaling["cells"]["max"], scaling["front_ends"]["max"]) == (2, 4)


def test_ray_labels_are_a_field_of_the_group() -> None:
    assert first_group(group(rayLabels={"role": "drafter"}))["labels"] == {"role": "drafter"}


def test_a_group_may_start_empty() -> None:
    found = first_group(group(minReplicas=0))
    assert (found["replicas"], found["minReplicas"]) == (0, 0)


def test_the_operators_probes_stand_unless_replaced() -> None:
    assert "readinessProbe" not in container(group())
    probe = {"exec": {"command": ["true"]}}
    assert container(group(probes={"readinessProbe": probe}))["readinessProbe"] == probe


# -- cluster -------------------------------------------------------------------------------------------


def test_the_autoscaler_is_the_second_version() -> None:
    found = cluster()
    assert found["enableInTreeAutoscaling"] is True
    assert found["autoscalerOptions"]["version"] == "v2"


def test_without_autoscaler_nobody_has_a_service_accounts_token() -> None:
    pods = [pod["spec"] for _, pod in templates(cluster({"autoscaler": {"enabled": False}}))]
    assert [pod["automountServiceAccountToken"] for pod in pods] == [False, False]


def test_with_it_only_the_head_has() -> None:
    tokens = {name: pod["spec"].get("automountServiceAccountToken") for name, pod in templates(cluster())}
    assert tokens == {"head": None, "cpu": False}


def test_pods_are_never_restarted_in_place() -> None:
    assert {pod["spec"]["restartPolicy"] for _, pod in templates(cluster())} == {"Never"}


def test_ray_asks_for_a_token() -> None:
    assert cluster()["authOptions"] == {"mode": "token"}


def test_older_operators_need_rays_authentication_off() -> None:
    values = {"rayAuthentication": "disabled"}
    assert "authOptions" not in cluster(values)
    assert env(values)["RAY_AUTH_MODE"] == "disabled"


def test_redis_password_comes_from_its_secret() -> None:
    values = {
        "gcsFaultTolerance": {
            "enabled": True,
            "redisAddress": "redis:6379",
            "redisUsername": "flotilla",
            "redisPassword": {"secretName": "r"},
        }
    }
    options = cluster(values)["gcsFaultToleranceOptions"]
    assert options["redisUsername"] == {"value": "flotilla"}
    assert options["redisAddress"] == "redis:6379"
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"] == {"name": "r", "key": "password"}


def test_no_redis_unless_asked_for() -> None:
    assert "gcsFaultToleranceOptions" not in cluster()


def test_incremental_upgrades_are_configured() -> None:
    strategy = {"type": "NewClusterWithIncrementalUpgrade", "incremental": {"gatewayClassName": "istio"}}
    values = {"upgrade": strategy, "tests": {"enabled": False}}
    found = ray_service(values)["spec"]["upgradeStrategy"]
    options = {
        "gatewayClassName": "istio",
        "stepSizePercent": 25,
        "intervalSeconds": 30,
        "maxSurgePercent": 100,
    }
    assert found == {"type": strategy["type"], "clusterUpgradeOptions": options}
    assert "port-forward" not in notes(values)


def test_an_old_cluster_may_stay_no_time_at_all() -> None:
    assert (
        ray_service({"upgrade": {"deletionDelaySeconds": 0}})["spec"]["rayClusterDeletionDelaySeconds"] == 0
    )
    assert "rayClusterDeletionDelaySeconds" not in ray_service()["spec"]
