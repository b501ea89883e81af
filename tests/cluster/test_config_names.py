"""Names in the configuration are checked when it is read, and are those that there are."""

from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

from cluster.batching.registry import BATCHING_RULES
from cluster.config import FlotillaConfig
from cluster.config_names import BATCHING_NAMES, POLICY_NAMES, SELECTOR_NAMES
from cluster.policies.registry import POLICIES
from selector.registry import SELECTORS


def test_the_names_are_those_of_the_registries() -> None:
    assert set(POLICY_NAMES) == set(POLICIES)
    assert set(BATCHING_NAMES) == set(BATCHING_RULES)
    assert set(SELECTOR_NAMES) == set(SELECTORS)


@pytest.mark.parametrize(
    ("section", "field", "kind", "known"),
    [
        ("policy", "name", "policy", POLICY_NAMES),
        ("selector", "name", "selector", SELECTOR_NAMES),
        ("scheduler", "batching", "batching rule", BATCHING_NAMES),
    ],
)
def test_an_unknown_name_is_refused_with_those_there_are(
    section: str, field: str, kind: str, known: tuple[str, ...]
) -> None:
    config = {"target": {"path": "x"}, section: {field: "flotila"}}
    with pytest.raises(ValidationError) as refusal:
        FlotillaConfig.model_validate(config)
    (error,) = refusal.value.errors()
    assert error["loc"] == (section, field)
    assert f"unknown {kind} `flotila`" in error["msg"]
    assert all(name in error["msg"] for name in known)


def test_the_schema_lists_them() -> None:
    definitions = FlotillaConfig.model_json_schema()["$defs"]
    for section, names in (("PolicyConfig", POLICY_NAMES), ("SelectorConfig", SELECTOR_NAMES)):
        built_in, own = definitions[section]["properties"]["name"]["anyOf"]
        assert built_in["enum"] == list(names)
        assert re.search(own["pattern"], "my_module.Mine")
        assert not any(re.search(own["pattern"], name) for name in names)
    assert definitions["SchedulerConfig"]["properties"]["batching"]["enum"] == list(BATCHING_NAMES)
