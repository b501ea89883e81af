"""Members that stop reporting are told once; who listens badly tells nobody."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.members import Member, State
from cluster.supervision import Supervisor


def member(name: str, state: State = "ready") -> Member:
    return Member(kind="cell", id=name, node="here", state=state)


def look(supervisor: Supervisor, *, reporting: list[Member], times: int) -> list[str]:
    """Ids told in so many looks, between which these report."""
    told = []
    for _ in range(times):
        for one in reporting:
            supervisor.heard(one)
        told += [one.id for one in supervisor.look()]
    return told


def test_a_silent_member_is_told_once_and_again_when_it_is_silent_again() -> None:
    supervisor = Supervisor(silent_s=5.0, look_s=0.5)
    one, two = member("one"), member("two")
    assert look(supervisor, reporting=[one, two], times=40) == []
    assert look(supervisor, reporting=[two], times=10) == []
    assert look(supervisor, reporting=[two], times=40) == ["one"]
    assert look(supervisor, reporting=[one, two], times=5) == []
    assert look(supervisor, reporting=[two], times=40) == ["one"]


def test_nobody_is_told_while_all_are_silent() -> None:
    supervisor = Supervisor(silent_s=5.0, look_s=0.5)
    look(supervisor, reporting=[member("one"), member("two")], times=2)
    assert look(supervisor, reporting=[], times=200) == []
    # Reports arrive again, the first of one member before those of the other.
    assert look(supervisor, reporting=[member("two"), member("one")], times=3) == []


def test_who_is_heard_of_first_after_a_silence_of_all_does_not_cost_the_others_their_lives() -> None:
    """Each of them waits up to seconds before it reports again: looks come between their reports."""
    supervisor = Supervisor(silent_s=5.0, look_s=0.5)
    one, two, three = member("one"), member("two"), member("three")
    look(supervisor, reporting=[one, two, three], times=2)
    look(supervisor, reporting=[two, three], times=3)
    assert look(supervisor, reporting=[], times=200) == []
    assert look(supervisor, reporting=[three], times=3) == []
    # Who was silent before, and stays so when others are heard of, is gone all the same.
    assert look(supervisor, reporting=[two, three], times=10) == ["one"]


def test_who_starts_or_drains_may_be_held_up_for_longer() -> None:
    supervisor = Supervisor(silent_s=5.0, look_s=0.5)
    look(supervisor, reporting=[member("one", "starting"), member("two")], times=1)
    assert look(supervisor, reporting=[member("two")], times=80) == []
    assert look(supervisor, reporting=[member("two")], times=10) == ["one"]


def test_who_has_left_is_not_told() -> None:
    supervisor = Supervisor(silent_s=5.0, look_s=0.5)
    look(supervisor, reporting=[member("one"), member("two")], times=1)
    supervisor.forget("one")
    assert look(supervisor, reporting=[member("two")], times=100) == []


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=80))
def test_only_who_missed_all_looks_of_the_time_allowed_is_told(reports: list[tuple[bool, bool]]) -> None:
    supervisor = Supervisor(silent_s=3.0, look_s=0.5)
    missed = {"one": 0, "two": 0}
    for name in missed:
        supervisor.heard(member(name))
    for one, two in reports:
        for name, reported in (("one", one), ("two", two)):
            missed[name] = 0 if reported else missed[name] + 1
            if reported:
                supervisor.heard(member(name))
        for told in supervisor.look():
            assert missed[told.id] >= 6
            assert min(missed.values()) < 4, "nobody was heard of who would show that reports arrive"
