"""What a cell reserved is freed only when no cell has named it for long enough."""

from __future__ import annotations

from deployments.abandoned_groups import EMPTY_AFTER_S, AbandonedGroups

OWN, OTHER = "flotilla:app:one:a1", "flotilla:app:two:b1"
BOTH = {"one", "two"}
AFTER_S = 100.0


def test_a_lineage_that_reports_keeps_its_groups() -> None:
    groups = AbandonedGroups("app", AFTER_S)
    for now in range(0, 1000, 50):
        groups.heard("one", float(now))
        assert groups.among([OWN], BOTH, float(now) + 1.0) == []


def test_one_that_is_heard_of_no_more_loses_them_after_a_while() -> None:
    groups = AbandonedGroups("app", AFTER_S)
    groups.heard("one", 0.0)
    groups.heard("two", 0.0)
    assert groups.among([OWN, OTHER], BOTH, 60.0) == []
    groups.heard("two", 90.0)
    assert groups.among([OWN, OTHER], BOTH, AFTER_S) == []
    assert groups.among([OWN, OTHER], BOTH, AFTER_S + 1.0) == [OWN]
    assert groups.among([OWN, OTHER], BOTH, 2 * AFTER_S) == [OWN, OTHER]


def test_who_begins_to_look_gives_everybody_that_while() -> None:
    groups = AbandonedGroups("app", AFTER_S)
    assert groups.among([OWN], BOTH, 1e6) == []
    assert groups.among([OWN], BOTH, 1e6 + AFTER_S) == []
    assert groups.among([OWN], BOTH, 1e6 + AFTER_S + 1.0) == [OWN]


def test_groups_of_others_are_none_of_its_business() -> None:
    groups = AbandonedGroups("app", AFTER_S)
    names = ["flotilla:app2:one:a1", "flotilla:ap", "somebody else's", ""]
    for now in (0.0, 1e6, 2e6):
        assert groups.among(names, BOTH, now) == []


def test_where_no_workers_wait_for_another_cell_it_takes_less_long() -> None:
    groups = AbandonedGroups("app", AFTER_S)
    for lineage in BOTH:
        groups.heard(lineage, 0.0)
    assert groups.among([OWN, OTHER], {"two"}, EMPTY_AFTER_S) == []
    assert groups.among([OWN, OTHER], {"two"}, EMPTY_AFTER_S + 1.0) == [OWN]
