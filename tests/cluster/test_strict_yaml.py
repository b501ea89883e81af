"""YAML that says nothing twice."""

from __future__ import annotations

import pytest
import yaml

from cluster.strict_yaml import DoubleField, load_yaml


@pytest.mark.parametrize(
    "text", ["http: {port: 1}\nhttp: {host: a}", "a: [{b: 1, b: 1}]", "a: &x {b: 1}\nc: {<<: *x, d: 1, d: 2}"]
)
def test_a_field_that_is_given_twice_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(DoubleField, match=r"`(http|b|d)` is given twice") as caught:
        load_yaml(text)
    assert caught.value.problem_mark is not None
    assert yaml.safe_load(text), "PyYAML takes it"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "target:\n  served_name: 2025-31-12",
            r"\(month must be in 1..12\); put quotes around text\n.*line 2",
        ),
        (f"a: {'9' * 5000}", r"looks like a date or a number is none"),
        (f"a: {'[' * 5000}{']' * 5000}", "too deep to be read"),
    ],
)
def test_what_python_cannot_hold_is_an_error_in_the_file(text: str, told: str) -> None:
    with pytest.raises(yaml.YAMLError, match=told):
        load_yaml(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- a\n- a",
        "1: a\n'1': b",
        "base: &base {a: 1, b: 2}\nc: {<<: *base, a: 3}",
        # What is merged first here is itself merged from another, and written deeper.
        "x: {y: {z: &deep {<<: &base {a: 1}, a: 2}}}\nc: {<<: *deep}\nd: {<<: [*base, *deep]}",
    ],
)
def test_other_texts_are_read_as_they_were(text: str) -> None:
    assert load_yaml(text) == yaml.safe_load(text)
