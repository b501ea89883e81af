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

    # What looks like a date or a number need be none, such as 2025-31-12: Python says so without the place.
    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            problem = f"a value that looks like a date or a number is none ({error}); put quotes around text"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None


def load_yaml(text: str) -> Any:
    """What `yaml.safe_load` gives.

    Raises:
        yaml.YAMLError: also where a mapping has a field twice, or a value cannot be what it looks like.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("lists or fields lie in one another too deep to be read") from None
