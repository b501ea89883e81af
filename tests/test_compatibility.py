"""docs/compatibility.md: every field of every endpoint has a test that shows it, and that test is run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from scripts import compatibility_table
from scripts.compatibility_table import DOCUMENT, Mark, table, untested

TESTS = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def marks() -> Iterator[list[Mark]]:
    """All marks: they are looked for in every file of the tests, for seconds, and so once."""
    found = list(compatibility_table.marks())
    with mock.patch.object(compatibility_table, "marks", return_value=found):
        yield found


def test_every_field_is_tested() -> None:
    assert untested() == []


def test_the_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == table(), "run `make docs`"


def test_marked_tests_are_collected(request: pytest.FixtureRequest, marks: list[Mark]) -> None:
    """The table reads the marks from the files; here they are those of the tests that pytest found."""
    collected = {
        (item.path.relative_to(TESTS).as_posix() + "::" + item.originalname, mark.args[0])
        for item in request.session.items
        if isinstance(item, pytest.Function)
        for mark in item.iter_markers("api")
    }
    assert collected <= {(mark.test, mark.endpoint) for mark in marks}
    if {path.parent.name for path in (item.path for item in request.session.items)} >= {
        "deployments",
        "system",
    }:
        assert collected == {(mark.test, mark.endpoint) for mark in marks}
