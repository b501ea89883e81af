"""YAML that says nothing twice."""

from __future__ import annotations

from typing import Any

import yaml


class DoubleField(yaml.MarkedYAMLError):
    """A mapping has a field twice, which YAML forbids; PyYAML takes the last and drops the others unsaid."""


class _Loader(yaml.SafeLoader):
    # As it was composed: what `<<` merges in is not there yet, and its fields may well be written again.
    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (name := (key.tag, key.value)) in seen:
                problem = f"`{key.value}` is given twice; only one of them could hold"
                raise DoubleField(problem=problem, problem_mark=key.start_mark)
            seen.add(name)
        return node


def load_yaml(text: str) -> Any:
    """What `yaml.safe_load` gives; raises `yaml.YAMLError` also where a mapping has a field twice."""
    return yaml.load(text, _Loader)
