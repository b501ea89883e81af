"""Quantities as the RayService's schema takes them: integers and strings, where values may be any number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helm.rayservice_crd import check_crd
from tests.helm.rendered_chart import cluster, container, group, merged, ray_service, worker

DOWNLOAD = {
    "models": {
        "source": "download",
        "download": [{"repository": "a/b", "revision": "0" * 40, "directory": "target"}],
    },
    "config": {"target": {"path": "/models/target"}, "drafters": []},
}
#: Of everything that is a quantity, a number with a fraction.
FRACTIONS = merged(
    group(resources={"requests": {"cpu": 0.5, "memory": "2Gi"}, "limits": {"cpu": 1.5, "memory": "2Gi"}}),
    {
        "head": {"resources": {"requests": {"cpu": 0.25}, "limits": {"cpu": 2.5}}},
        "autoscaler": {"resources": {"requests": {"cpu": 0.2}, "limits": {"cpu": 1.25}}},
        "pods": {"tmpSizeLimit": 1073741824.5},
    },
    DOWNLOAD,
    {
        "models": {
            "downloadSizeLimit": 1073741824.5,
            "downloadResources": {"requests": {"cpu": 0.5}, "limits": {"cpu": 1.5}},
        }
    },
)


def quantities(part: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All of resources and sizes of volumes below a part."""
    if isinstance(part, list):
        for one in part:
            yield from quantities(one, name)
    elif isinstance(part, dict):
        for key, value in part.items():
            if key in ("requests", "limits") and isinstance(value, dict):
                yield from value.items()
            elif key == "sizeLimit":
                yield key, value
            else:
                yield from quantities(value, key)


def test_fractions_are_written_as_text() -> None:
    found = list(quantities(cluster(FRACTIONS)))
    assert {"cpu", "memory", "sizeLimit", "ephemeral-storage"} <= {name for name, _ in found}
    assert [(name, value) for name, value in found if not isinstance(value, int | str)] == []
    assert container(FRACTIONS)["resources"] == {
        "requests": {"cpu": "0.5", "memory": "2Gi"},
        "limits": {"cpu": "1.5", "memory": "2Gi"},
    }


def test_the_crd_takes_fractions(crd: Any) -> None:
    check_crd(ray_service(FRACTIONS), crd)


@pytest.mark.parametrize("size", [1, 10_737_418_240, 68_719_476_736])
def test_whole_numbers_stay_integers_in_all_their_digits(size: int) -> None:
    resources = {"requests": {"memory": size}, "limits": {"memory": size, "cpu": 2}}
    values = merged(
        group(resources=resources),
        DOWNLOAD,
        {"models": {"downloadSizeLimit": size}},
        {"pods": {"tmpSizeLimit": size}},
    )
    assert container(values)["resources"] == resources
    limits = {
        volume["name"]: volume.get("emptyDir", {}).get("sizeLimit") for volume in worker(values)["volumes"]
    }
    assert (limits["tmp"], limits["models"]) == (size, size)
    assert str(size) == worker(values)["initContainers"][0]["resources"]["requests"]["ephemeral-storage"]
