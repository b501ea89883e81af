"""The five scenarios: lint, Kubernetes' schemas, the operator's rules, Flotilla's configuration loader."""

from __future__ import annotations

import copy
import json
from functools import cache
from importlib.resources import files as files_of
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema
from referencing import Registry, Resource

from cluster.config import FlotillaConfig
from cluster.drafter_config import DrafterConfig
from cluster.placement import plan_cell
from deployments.grpc_start import grpc_options
from deployments.names import APP_NAME
from tests.helm.operator_rules import violations
from tests.helm.rayservice_crd import check_crd
from tests.helm.rendered_chart import (
    CHART,
    SCENARIOS,
    cluster,
    files,
    flotilla_args,
    helm,
    objects,
    of_kind,
    plain,
    ray_service,
    scenario,
    serve_config,
    templates,
)

pytest.importorskip("kubernetes_validate")

VERSIONS = [f"1.{minor}" for minor in range(27, 38)]
#: Kinds of operators: no schema in Kubernetes' own, so each needs a test here.
CUSTOM = {"RayService", "PodMonitor", "PrometheusRule", "HTTPRoute"}


def test_there_are_the_five_scenarios() -> None:
    assert SCENARIOS == ["air-gapped", "cells", "cpu-demo", "drafters-tp4", "one-gpu"]


@pytest.mark.parametrize("name", ["defaults", *SCENARIOS])
def test_lint_is_strict_and_silent(name: str) -> None:
    report = helm.lint(
        CHART, {} if name == "defaults" else scenario(name), strict=True, kube_version="v1.30.0"
    )
    found = [message for message in report["messages"] if message["severity"] > 1]
    assert not found
    assert not report["errors"]


@cache
def core_objects() -> list[Any]:
    """All objects of Kubernetes' own kinds that the scenarios render, and every pod template as a pod."""
    found: dict[str, Any] = {}
    for name in SCENARIOS:
        rendered = [each for each in objects(scenario(name)) if each["kind"] not in CUSTOM]
        for group, template in templates(cluster(scenario(name))):
            metadata = {"name": group, **template["metadata"]}
            rendered.append(
                {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
            )
        found |= {json.dumps(each, sort_keys=True): each for each in rendered}
    return list(found.values())


def schema_of(version: str, name: str) -> Any:
    directory = files_of("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    return json.loads((directory / f"{name}.json").read_text())


def core_errors(found: Any, version: str, definitions: Any) -> list[str]:
    """As `kubernetes_validate.validate`, which reads 2 MB of definitions for each object."""
    group, _, api_version = found["apiVersion"].rpartition("/")
    schema = schema_of(
        version, "-".join(filter(None, [found["kind"].lower(), group.split(".")[0], api_version]))
    )
    registry = Resource.from_contents(schema) @ (definitions @ Registry())
    validator = jsonschema.Draft202012Validator(schema, registry=registry)
    return [f"{found['kind']} {error.json_path}: {error.message}" for error in validator.iter_errors(found)]


@pytest.mark.parametrize(
    "version",
    [
        # The oldest, the newest and one between them; the others differ from their neighbours by little.
        pytest.param(version, marks=[pytest.mark.thorough] if at not in (0, 5, len(VERSIONS) - 1) else [])
        for at, version in enumerate(VERSIONS)
    ],
)
def test_core_kinds_are_valid_on_this_version_of_kubernetes(version: str) -> None:
    definitions = Resource.from_contents(schema_of(version, "_definitions"))
    kinds = {found["kind"] for found in core_objects()}
    assert kinds == {"ConfigMap", "Ingress", "NetworkPolicy", "Pod", "PodDisruptionBudget", "Service"}
    assert [error for found in core_objects() for error in core_errors(found, version, definitions)] == []


def test_an_unknown_field_of_a_core_kind_would_be_found() -> None:
    definitions = Resource.from_contents(schema_of("1.30", "_definitions"))
    pod = {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [{"name": "a", "prots": []}]}}
    (error,) = core_errors(pod, "1.30", definitions)
    assert "prots" in error


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_operator_would_take_it(name: str) -> None:
    assert violations(ray_service(scenario(name))) == []


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_custom_resource_is_valid(name: str, crd: Any) -> None:
    check_crd(ray_service(scenario(name)), crd)


def test_an_unknown_field_of_the_custom_resource_would_be_found(crd: Any) -> None:
    service = copy.deepcopy(ray_service())
    service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]["prots"] = []
    with pytest.raises(jsonschema.ValidationError, match="prots"):
        check_crd(service, crd)


@pytest.mark.parametrize("name", SCENARIOS)
def test_ray_serve_reads_the_serve_config(name: str) -> None:
    parsed = ServeDeploySchema.model_validate(serve_config(scenario(name)))
    assert [application.name for application in parsed.applications] == [APP_NAME]
    assert parsed.applications[0].import_path == "deployments.serving:build_app"


@pytest.mark.parametrize("name", SCENARIOS)
def test_flotilla_loads_the_configuration(name: str, tmp_path: Path) -> None:
    written = tmp_path / "config.yaml"
    written.write_text(yaml.safe_dump(flotilla_args(scenario(name))))
    config = FlotillaConfig.load(written)
    assert config.target.path == scenario(name)["config"]["target"]["path"]
    assert len(config.drafters) == len(scenario(name)["config"]["drafters"])
    plan_cell(config)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_model_drafter_has_a_device_where_the_target_has_one(name: str) -> None:
    config = FlotillaConfig.model_validate(flotilla_args(scenario(name)))
    for drafter in config.drafters:
        if drafter.kind == "model" and config.target.placement.num_gpus:
            assert drafter.placement.num_gpus > 0, drafter.name


@pytest.mark.parametrize("name", SCENARIOS)
def test_names_fit_what_kubernetes_and_the_operator_append_to(name: str) -> None:
    longest = "r" * 53  # Helm's limit for a release's name
    for found in objects(scenario(name), name=longest):
        assert len(found["metadata"]["name"]) <= 63, found["kind"]
    assert violations(ray_service(scenario(name), name=longest)) == []


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_object_is_in_the_namespace_and_labelled(name: str) -> None:
    for found in objects(scenario(name)):
        assert found["metadata"]["namespace"] == "serving"
        assert found["metadata"]["labels"]["app.kubernetes.io/instance"] == "demo"


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_volume_that_is_mounted_is_there(name: str) -> None:
    for group, template in templates(cluster(scenario(name))):
        pod = template["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for one in [*pod["containers"], *pod.get("initContainers", [])]:
            assert {mount["name"] for mount in one["volumeMounts"]} <= volumes, group


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_container_is_restricted(name: str) -> None:
    pods = [template["spec"] for _, template in templates(cluster(scenario(name)))]
    pods += [found["spec"] for found in of_kind("Pod", scenario(name))]
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for one in [*pod["containers"], *pod.get("initContainers", [])]:
            context = one["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_node_of_every_group_can_be_drained(name: str) -> None:
    for group in scenario(name)["workerGroups"]:
        available = group.get("podDisruptionBudget", {}).get("minAvailable", 0)
        assert available < group["minReplicas"], group["name"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_head_does_no_work(name: str) -> None:
    params = cluster(scenario(name))["headGroupSpec"]["rayStartParams"]
    assert (params["num-cpus"], params["num-gpus"]) == ("0", "0")
    assert "resources" not in params
    config = FlotillaConfig.model_validate(flotilla_args(scenario(name)))
    for placed in (config.scaling.cells.placement, config.scaling.front_ends.placement):
        assert placed.resources
    assert all(plan_cell(config).seat_of(drafter.name) is not None for drafter in one_of_each(config))


def one_of_each(config: FlotillaConfig) -> list[DrafterConfig]:
    """Drafters with one instance, which is called like its kind."""
    return [drafter for drafter in config.drafters if drafter.replicas == 1]


@pytest.mark.parametrize("name", ["drafters-tp4", "cells"])
def test_dashboards_and_rules_are_shipped_as_they_are_in_the_repository(name: str) -> None:
    shipped = {
        key: text for found in of_kind("ConfigMap", scenario(name)) for key, text in found["data"].items()
    }
    assert {key: json.loads(text) for key, text in shipped.items()} == {
        path.name: json.loads(path.read_text()) for path in (CHART / "dashboards").glob("*.json")
    }
    groups = [
        group for found in of_kind("PrometheusRule", scenario(name)) for group in found["spec"]["groups"]
    ]
    in_files = [plain(path.read_text())["groups"] for path in (CHART / "rules").glob("*.yaml")]
    assert sorted(group["name"] for group in groups) == sorted(
        group["name"] for part in in_files for group in part
    )
    assert shipped
    assert groups


def test_grpc_of_the_cells_scenario_is_what_flotilla_tells_serve() -> None:
    config = FlotillaConfig.model_validate(flotilla_args(scenario("cells")))
    assert serve_config(scenario("cells"))["grpc_options"] == grpc_options(config.grpc)


def test_nothing_is_rendered_for_what_is_off() -> None:
    kinds = sorted(found["kind"] for found in objects())
    assert kinds == ["Pod", "RayService"]
    assert files()["flotilla/templates/NOTES.txt"]
