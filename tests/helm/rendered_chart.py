"""Renders the chart by Helm's own engine, in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

# Helm reads it as it is loaded. By default a third of its time goes into collecting garbage.
os.environ.setdefault("GOGC", "800")
helm = pytest.importorskip("helm_python", reason="pip install -e '.[dev-kubernetes]'")

CHART = Path(__file__).resolve().parents[2] / "helm" / "flotilla"
SCENARIOS = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))

Object = dict[str, Any]


@cache
def chart() -> Any:
    return helm.Chart.load(CHART)


def plain(text: str) -> Any:
    """What `yaml.safe_load` gives, by libyaml: in a tenth of the time."""
    return yaml.load(text, Loader=yaml.CSafeLoader)


def scenario(name: str) -> Object:
    return dict(plain((CHART / "ci" / f"{name}-values.yaml").read_text()))


def files(
    values: Mapping[str, Any] | None = None,
    *,
    name: str = "demo",
    namespace: str = "serving",
    loaded: Any = None,
) -> dict[str, str]:
    """Rendered text by template."""
    if loaded is not None:
        return dict(loaded.render(dict(values or {}), name=name, namespace=namespace))
    return dict(_rendered(json.dumps(values or {}), name, namespace))


@cache
def _rendered(values: str, name: str, namespace: str) -> dict[str, str]:
    """By the chart as it stands, which is asked for the same several times, and takes long."""
    return dict(chart().render(json.loads(values), name=name, namespace=namespace))


def objects(values: Mapping[str, Any] | None = None, **options: Any) -> list[Object]:
    rendered = files(values, **options)
    return [
        found
        for path, text in rendered.items()
        if not path.endswith("NOTES.txt") and text.strip()
        for found in parsed(text)
        if found
    ]


class _Strict(yaml.CSafeLoader):
    """Refuses a key that comes twice in a map, as the API server does and PyYAML does not."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"twice: {twice}", node.start_mark)
        return dict(super().construct_mapping(node, deep))


@cache
def parsed(text: str) -> list[Object]:
    """The objects of a text; to be read only. By libyaml: dashboards are long."""
    return list(yaml.load_all(text, Loader=_Strict))


def of_kind(kind: str, values: Mapping[str, Any] | None = None, **options: Any) -> list[Object]:
    return [found for found in objects(values, **options) if found["kind"] == kind]


def ray_service(values: Mapping[str, Any] | None = None, **options: Any) -> Object:
    (found,) = of_kind("RayService", values, **options)
    return found


def cluster(values: Mapping[str, Any] | None = None, **options: Any) -> Object:
    return dict(ray_service(values, **options)["spec"]["rayClusterConfig"])


def serve_config(values: Mapping[str, Any] | None = None) -> Object:
    return dict(plain(ray_service(values)["spec"]["serveConfigV2"]))


def flotilla_args(values: Mapping[str, Any] | None = None) -> Object:
    return dict(serve_config(values)["applications"][0]["args"])


def templates(ray_cluster: Object) -> Iterator[tuple[str, Object]]:
    """Pod templates, by group."""
    yield "head", ray_cluster["headGroupSpec"]["template"]
    for group in ray_cluster["workerGroupSpecs"]:
        yield group["groupName"], group["template"]


def worker(values: Mapping[str, Any] | None = None) -> Object:
    """Pod spec of the first group."""
    return dict(cluster(values)["workerGroupSpecs"][0]["template"]["spec"])


def container(values: Mapping[str, Any] | None = None) -> Object:
    return dict(worker(values)["containers"][0])


def refusal(values: Mapping[str, Any]) -> str:
    """What Helm says of wrong values. Paths are JSON pointers, in which `/` within a name is `~1`."""
    with pytest.raises(helm.HelmError) as refused:
        files(values)
    return str(refused.value).replace("~1", "/")


def notes(values: Mapping[str, Any] | None = None) -> str:
    return next(text for path, text in files(values).items() if path.endswith("NOTES.txt"))


def merged(*parts: Mapping[str, Any]) -> Object:
    """Deeply merged, as Helm merges values files."""
    result: Object = {}
    for part in parts:
        for key, value in part.items():
            both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
            result[key] = merged(result[key], value) if both else value
    return json.loads(json.dumps(result))


def group(**changes: Any) -> Object:
    """Values of one worker group that is valid, with changes; None removes a field."""
    resources = {"requests": {"cpu": "8"}, "limits": {"cpu": "8"}}
    found = {"name": "cpu", "minReplicas": 1, "maxReplicas": 2, "resources": resources, **changes}
    return {"workerGroups": [{key: value for key, value in found.items() if value is not None}]}


def gpu_group(**changes: Any) -> Object:
    """The same with GPUs, of which the target reserves one."""
    on_gpu = {"target": {"placement": {"num_gpus": 1}}, "drafters": []}
    return merged(group(**{"gpu": {"count": 1}, **changes}), {"config": on_gpu})
