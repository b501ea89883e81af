"""How a model writes calls of tools is its own affair: what the demo's needs does not reach others."""

from __future__ import annotations

import pytest

from tests.helm.rendered_chart import flotilla_args, merged

VOLUME = {"models": {"source": "pvc", "pvc": {"claimName": "models"}}}


def test_the_demo_writes_calls_as_hermes() -> None:
    """Its chat template shows none, from which `auto` would take that it makes none."""
    assert flotilla_args()["target"]["tool_parser"] == "hermes"


def test_a_target_of_which_the_path_alone_is_given_has_the_parser_of_its_template() -> None:
    values = merged(VOLUME, {"config": {"target": {"path": "/models/llama"}, "drafters": []}})
    assert "tool_parser" not in flotilla_args(values)["target"]


@pytest.mark.parametrize("path", ["/models/llama", "zoo:target-8x384"])
def test_a_parser_that_is_given_stays(path: str) -> None:
    values = merged(VOLUME, {"config": {"target": {"path": path, "tool_parser": "json"}, "drafters": []}})
    assert flotilla_args(values)["target"]["tool_parser"] == "json"
