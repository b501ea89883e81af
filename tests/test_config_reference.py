"""docs/configuration.md says what cluster/config.py does."""

from __future__ import annotations

import yaml

from cluster.config import FlotillaConfig
from scripts.config_reference import EXAMPLE, REFERENCE, reference


def test_the_reference_is_up_to_date() -> None:
    assert REFERENCE.read_text() == reference(), "run `make docs`"


def test_its_example_is_a_valid_configuration() -> None:
    config = FlotillaConfig.model_validate(yaml.safe_load(EXAMPLE))
    assert config.target.tensor_parallel == 2
    assert [drafter.name for drafter in config.drafters] == ["small", "prompt-lookup"]
