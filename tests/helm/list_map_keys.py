"""Lists that the API server takes for maps, and refuses two items of the same key of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: Of pods, within a RayService as well as by themselves.
KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
    "imagePullSecrets": ("name",),
    "ports": ("containerPort", "protocol"),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
_DEFAULTS = {"protocol": "TCP"}


def repeated(value: Any, path: str = "") -> Iterator[str]:
    """What comes twice, anywhere in an object."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from repeated(item, f"{path}[{index}]")
    if not isinstance(value, dict):
        return
    for name, part in value.items():
        where = f"{path}.{name}"
        if name in KEYS and isinstance(part, list) and all(KEYS[name][0] in item for item in part):
            found = [tuple(item.get(key, _DEFAULTS.get(key)) for key in KEYS[name]) for item in part]
            yield from sorted({f"{where}: {keys}" for keys in found if found.count(keys) > 1})
        yield from repeated(part, where)


def of_schema(schema: Any, name: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names and keys of such lists in a CRD's schema."""
    if keys := schema.get("x-kubernetes-list-map-keys"):
        yield name, tuple(keys)
    for field, part in schema.get("properties", {}).items():
        yield from of_schema(part, field)
    if isinstance(items := schema.get("items"), dict):
        yield from of_schema(items, name)
