"""Text stays text where YAML would read a number, a truth or a map: the API server refuses those."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helm.rendered_chart import cluster, group, merged, objects, templates

#: Kubernetes takes such names, of namespaces and of most objects.
DIGITS = "2024"
SECRET = {"secretName": DIGITS, "key": DIGITS}
ON = {"enabled": True}
ANYBODY = [{"namespaceSelector": {}}]

ALL_OF_DIGITS = merged(
    group(
        serviceAccountName=DIGITS,
        runtimeClassName=DIGITS,
        priorityClassName=DIGITS,
        podDisruptionBudget={"minAvailable": 1},
    ),
    {
        "image": {"pullSecrets": [DIGITS]},
        "models": {"source": "pvc", "pvc": {"claimName": DIGITS, "subPath": DIGITS}},
        "apiKeys": {**ON, "existingSecret": DIGITS, "key": DIGITS, "client": SECRET},
        "ingress": {**ON, "className": DIGITS, "host": DIGITS, "tlsSecretName": DIGITS},
        "httpRoute": {**ON, "parentRefs": [{"name": DIGITS, "namespace": DIGITS}]},
        "gcsFaultTolerance": {**ON, "redisAddress": "redis:6379", "redisPassword": SECRET},
        "pods": {"schedulerName": DIGITS},
        "head": {"priorityClassName": DIGITS, "podDisruptionBudget": ON},
        "networkPolicy": {**ON, "operatorNamespace": DIGITS, "monitoring": ANYBODY},
        "monitoring": {"podMonitor": ON, "rules": ON, "dashboards": {**ON, "namespace": DIGITS}},
        "config": {"grpc": ON},
    },
)


def leaves(found: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Whatever is neither map nor list, by its path."""
    parts = (
        found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else None
    )
    if parts is None:
        yield path, found
        return
    for key, part in parts:
        yield from leaves(part, f"{path}/{key}")


def test_names_of_digits_stay_text() -> None:
    rendered = objects(ALL_OF_DIGITS, namespace=DIGITS)
    found = [
        (f"{each['kind']}{path}", value)
        for each in rendered
        for path, value in leaves(each)
        if str(value) == DIGITS
    ]
    assert {each["metadata"]["namespace"] for each in rendered} == {DIGITS}
    assert [path for path, value in found if not isinstance(value, str)] == []


def test_a_secret_of_keys_is_of_text() -> None:
    hashed = f"hmac-sha256:{'0' * 32}:{'0' * 64}"
    keys = {"apiKeys": {"enabled": True, "key": DIGITS, "keys": [{"name": "a", "hash": hashed}]}}
    (secret,) = [each for each in objects(keys, namespace=DIGITS) if each["kind"] == "Secret"]
    assert list(secret["stringData"]) == [DIGITS]
    assert secret["metadata"]["namespace"] == DIGITS


@pytest.mark.parametrize("name", ["true", "null", "on"])
def test_a_whole_name_stays_text(name: str) -> None:
    values = {"fullnameOverride": name, "networkPolicy": ON, "ingress": ON}
    assert all(isinstance(each["metadata"]["name"], str) for each in objects(values))


@pytest.mark.parametrize("directory", ["1.0", "a: b", "a #b"])
def test_a_directory_of_a_volume_is_what_was_given(directory: str) -> None:
    values = {"models": {"source": "pvc", "pvc": {"claimName": "a", "subPath": directory}}}
    for _, template in templates(cluster(values)):
        (mount,) = [one for one in template["spec"]["containers"][0]["volumeMounts"] if "subPath" in one]
        assert mount["subPath"] == directory
