"""What tests of the chart share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

CRDS = Path(__file__).resolve().parents[3] / "shared" / "crds"


@pytest.fixture(scope="session")
def crd() -> Any:
    """The schema of KubeRay's RayService."""
    path = CRDS / "ray.io_rayservices.v1.schema.json"
    if not path.is_file():
        pytest.skip(f"the CRD's schema is not at {path}")
    return json.loads(path.read_text())
