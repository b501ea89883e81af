"""What values make of pods: labels, environment, mounts, containers, time to end."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.process_environment import PROCESS_ENVIRONMENT
from tests.helm import list_map_keys
from tests.helm.operator_rules import violations
from tests.helm.rayservice_crd import check_crd
from tests.helm.rendered_chart import (
    SCENARIOS,
    cluster,
    container,
    group,
    merged,
    objects,
    of_kind,
    ray_service,
    scenario,
    templates,
    worker,
)


def env(values: dict[str, Any]) -> dict[str, Any]:
    """Of Ray's container in the first group."""
    return {variable["name"]: variable.get("value") for variable in container(values)["env"]}


# -- names and labels ----------------------------------------------------------------------------------


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


def test_names_that_are_cut_are_apart() -> None:
    """Two groups whose names differ at the end only."""
    longest = [{**group()["workerGroups"][0], "name": f"{'g' * 23}{end}"} for end in "ab"]
    values = {"workerGroups": [{**each, "podDisruptionBudget": {"minAvailable": 1}} for each in longest]}
    names = [found["metadata"]["name"] for found in of_kind("PodDisruptionBudget", values, name="r" * 53)]
    assert len(set(names)) == len(names) == 2
    assert max(map(len, names)) <= 63


# -- environment ---------------------------------------------------------------------------------------


def every_variable(value: str) -> list[dict[str, str]]:
    """Those that the chart sets, each set by the user."""
    return [{"name": name, "value": value} for name in env(scenario("cpu-demo"))]


@pytest.mark.parametrize("name", SCENARIOS)
def test_ray_runs_in_the_environment_that_processes_take_on(name: str) -> None:
    """They could not set the arenas of an allocator that has begun."""
    spec = cluster(scenario(name))
    for each in [spec["headGroupSpec"], *spec.get("workerGroupSpecs", [])]:
        (ray, *_) = each["template"]["spec"]["containers"]
        found = {variable["name"]: variable.get("value") for variable in ray["env"]}
        assert found.items() >= PROCESS_ENVIRONMENT.items()


def test_a_variable_of_ones_own_wins_over_the_charts_and_a_groups_over_all() -> None:
    pods = {"pods": {"env": [{"name": "HF_HOME", "value": "/pods"}, {"name": "A", "value": "/pods"}]}}
    assert env(pods)["HF_HOME"] == "/pods"
    found = env(merged(pods, group(env=[{"name": "HF_HOME", "value": "/group"}])))
    assert (found["HF_HOME"], found["A"]) == ("/group", "/pods")


def test_a_variable_stays_behind_those_it_may_refer_to() -> None:
    given = [{"name": "BASE", "value": "/data"}, {"name": "HF_HOME", "value": "$(BASE)/hub"}]
    assert list(env({"pods": {"env": given}}))[-2:] == ["BASE", "HF_HOME"]


def test_environment_of_all_pods_comes_before_that_of_the_group() -> None:
    one = {"pods": {"env": [{"name": "A", "value": "1"}]}}
    assert list(env(merged(one, group(env=[{"name": "B", "value": "2"}]))))[-2:] == ["A", "B"]


def test_a_variable_may_come_from_elsewhere_instead() -> None:
    source = {"secretKeyRef": {"name": "a", "key": "b"}}
    found = container({"pods": {"env": [{"name": "HF_HOME", "valueFrom": source}]}})["env"]
    assert [one for one in found if one["name"] == "HF_HOME"] == [{"name": "HF_HOME", "valueFrom": source}]


# -- what the API server takes for maps ----------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_comes_twice_that_the_api_server_takes_for_a_map(name: str) -> None:
    values = merged(
        scenario(name), {"pods": {"env": every_variable("pods")}, "head": {"env": every_variable("head")}}
    )
    values["workerGroups"] = [{**each, "env": every_variable("group")} for each in values["workerGroups"]]
    for found in objects(values):
        assert list(list_map_keys.repeated(found)) == []


def test_what_comes_twice_would_be_found() -> None:
    pod = {"spec": {"containers": [{"name": "a", "env": [{"name": "A"}, {"name": "A"}]}, {"name": "a"}]}}
    found = list(list_map_keys.repeated(pod))
    assert [each.partition(":")[0] for each in found] == [".spec.containers", ".spec.containers[0].env"]


def test_the_lists_that_are_looked_at_are_those_of_the_api(crd: Any) -> None:
    known = set(list_map_keys.of_schema(crd))
    assert set(list_map_keys.KEYS.items()) <= known


# -- the autoscaler ------------------------------------------------------------------------------------


def test_the_autoscaler_can_write_below_its_home() -> None:
    found = cluster()
    options = found["autoscalerOptions"]
    (home,) = [one["value"] for one in options["env"] if one["name"] == "HOME"]
    (mount,) = options["volumeMounts"]
    head = dict(templates(found))["head"]
    assert home.startswith(mount["mountPath"])
    assert mount["name"] in {volume["name"] for volume in head["spec"]["volumes"]}
    assert mount["name"] not in {one["name"] for one in head["spec"]["containers"][0]["volumeMounts"]}


def test_the_autoscaler_talks_to_ray_as_pods_do() -> None:
    options = cluster({"rayAuthentication": "disabled"})["autoscalerOptions"]
    assert {"name": "RAY_AUTH_MODE", "value": "disabled"} in options["env"]


def test_nothing_is_made_for_an_autoscaler_that_there_is_not() -> None:
    head = dict(templates(cluster({"autoscaler": {"enabled": False}})))["head"]
    assert [volume["name"] for volume in head["spec"]["volumes"]] == ["tmp"]


# -- what pods may have besides ------------------------------------------------------------------------

SIDECAR = {"name": "shipper", "image": "shipper:1", "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}]}
BESIDES: dict[str, Any] = {
    "pods": {
        "initContainers": [{"name": "prepare", "image": "busybox:1"}],
        "extraContainers": [SIDECAR],
        "lifecycle": {"preStop": {"sleep": {"seconds": 5}}},
        "envFrom": [{"configMapRef": {"name": "proxy"}}],
        "schedulerName": "volcano",
        "labels": {"team": "pods", "tier": "pods"},
        "annotations": {"a": "pods", "b": "pods"},
    },
    "head": {"labels": {"team": "head"}, "annotations": {"a": "head"}},
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_pods_with_all_that_they_may_have_are_valid(name: str, crd: Any) -> None:
    service = ray_service(merged(scenario(name), BESIDES))
    check_crd(service, crd)
    assert violations(service) == []
    assert list(list_map_keys.repeated(service)) == []


def test_containers_are_behind_rays_and_before_downloads() -> None:
    values = merged(scenario("one-gpu"), BESIDES)
    for name, template in templates(cluster(values)):
        pod = template["spec"]
        assert [one["name"] for one in pod["containers"]] == [
            "ray-head" if name == "head" else "ray-worker",
            "shipper",
        ]
        assert pod["initContainers"][0]["name"] == "prepare"
        assert pod["schedulerName"] == "volcano"


def test_hooks_and_environment_are_of_rays_container() -> None:
    values = merged(scenario("one-gpu"), BESIDES)
    ray, shipper = worker(values)["containers"]
    assert ray["lifecycle"] == BESIDES["pods"]["lifecycle"]
    assert ray["envFrom"] == BESIDES["pods"]["envFrom"]
    assert shipper == SIDECAR
    assert all(one["envFrom"] == ray["envFrom"] for one in worker(values)["initContainers"][1:])


def test_labels_and_annotations_of_a_group_win_over_those_of_all_pods() -> None:
    values = merged(BESIDES, group(labels={"tier": "group"}, annotations={"b": "group"}))
    found = {name: template["metadata"] for name, template in templates(cluster(values))}
    assert found["head"]["annotations"] == {"a": "head", "b": "pods"}
    assert found["cpu"]["annotations"] == {"a": "pods", "b": "group"}
    assert (found["head"]["labels"]["team"], found["head"]["labels"]["tier"]) == ("head", "pods")
    assert (found["cpu"]["labels"]["team"], found["cpu"]["labels"]["tier"]) == ("pods", "group")
    assert found["cpu"]["labels"]["flotilla/group"] == "cpu"
