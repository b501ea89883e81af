"""docs/compatibility.md: every field of every endpoint has a test that shows it, and that test is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.compatibility_table import DOCUMENT, marks, table, untested

TESTS = Path(__file__).parent


def test_every_field_is_tested() -> None:
    assert untested() == []


def test_the_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == table(), "run `make docs`"


def test_marked_tests_are_collected(request: pytest.FixtureRequest) -> None:
    """The table reads the marks from the files; here they are those of the tests that pytest found."""
    collected = {
        (item.path.relative_to(TESTS).as_posix() + "::" + item.originalname, mark.args[0])
        for item in request.session.items
        if isinstance(item, pytest.Function)
        for mark in item.iter_markers("api")
    }
    assert collected <= {(mark.test, mark.endpoint) for mark in marks()}
    if {path.parent.name for path in (item.path for item in request.session.items)} >= {
        "deployments",
        "system",
    }:
        assert collected == {(mark.test, mark.endpoint) for mark in marks()}
