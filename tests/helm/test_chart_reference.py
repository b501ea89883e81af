"""What the chart's files repeat is current: the configuration's schema, the table of values."""

from __future__ import annotations

import json

from cluster.config import FlotillaConfig
from scripts.chart_reference import README, SCHEMA, VALUES, described_values, readme_text, schema_text


def test_schema_is_that_of_the_configuration() -> None:
    text = SCHEMA.read_text()
    assert text == schema_text(json.loads(text)), "run `make docs`"
    assert set(FlotillaConfig.model_fields) == set(json.loads(text)["$defs"]["FlotillaConfig"]["properties"])


def test_readme_has_the_values_as_they_are() -> None:
    assert README.read_text() == readme_text(README.read_text()), "run `make docs`"


def test_every_value_of_the_schema_is_described() -> None:
    described = {path for path, _, _ in described_values(VALUES.read_text())}
    schema = json.loads(SCHEMA.read_text())
    for name in schema["properties"]:
        if name != "global":
            assert any(path == name or path.startswith(f"{name}.") for path in described), name


def test_every_object_of_the_schema_is_closed() -> None:
    schema = json.loads(SCHEMA.read_text())
    free = {"global", "affinity", "securityContext", "containerSecurityContext"}
    for name, part in {**schema["properties"], **schema["$defs"]["workerGroup"]["properties"]}.items():
        if part.get("type") == "object" and name not in free:
            assert part.get("additionalProperties", True) is not True, name
