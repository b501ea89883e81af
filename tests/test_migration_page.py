"""docs/migrating.md names fields, metrics and configurations that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from cluster.config import FlotillaConfig

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "migrating.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
SECTIONS = "|".join(FlotillaConfig.model_fields)


def test_its_examples_are_valid_configurations() -> None:
    assert len(BLOCKS) == 2
    kinds = [
        [drafter.kind for drafter in FlotillaConfig.model_validate(yaml.safe_load(block)).drafters]
        for block in BLOCKS
    ]
    assert kinds == [["eagle"], ["eagle", "model", "suffix_automaton"]]
    fixed = re.search(r"`policy: ({name: fixed.*?})`", PAGE)
    assert fixed is not None
    assert FlotillaConfig.model_validate({"target": {"path": "x"}, "policy": yaml.safe_load(fixed[1])})


@pytest.mark.parametrize("field", sorted(set(re.findall(rf"`((?:{SECTIONS})(?:\.[a-z_]+)+)`", PAGE))))
def test_its_fields_are_those_of_the_configuration(field: str) -> None:
    model: type[BaseModel] = FlotillaConfig
    for name in field.split("."):
        assert name in model.model_fields, field
        annotation = model.model_fields[name].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            model = annotation


def test_its_metrics_are_exported() -> None:
    documented = (ROOT / "docs" / "metrics.md").read_text()
    named = set(re.findall(r"`(flotilla_[a-z_]+)`", PAGE))
    assert len(named) > 8
    assert [name for name in named if f"`{name}`" not in documented] == []
