"""Clients that ask again before the time they were told."""

from __future__ import annotations

import msgspec
import pytest

from cluster.door import Admitted
from cluster.promises import INSISTS_S, REPEATED_S, Promises
from cluster.stream_messages import Submit
from tests.cluster.test_overload_admission import Refusing, submitted


def told(promises: Promises, submit: Submit, now: float) -> float:
    return promises.make(submit, 10.0, 0.5, now, may_be_near=False)


@pytest.mark.parametrize("tenant", ["", "a key"])
def test_who_asks_again_too_early_is_told_of_the_same_time(tenant: str) -> None:
    promises, patient = Promises(3600.0), Promises(3600.0)
    asked, other = submitted(1, tenant=tenant), submitted(2, tenant=tenant)
    first = told(promises, asked, 100.0)
    assert told(patient, asked, 100.0) == first
    for second in range(1, int(first)):
        again = msgspec.structs.replace(asked, request_id=f"another {second}")
        assert told(promises, again, 100.0 + second) == first - second
    assert len(promises) == 1
    assert told(promises, other, 105.0) == told(patient, other, 105.0), "others wait no longer"
    assert promises.keep(asked, 100.0 + first)
    assert not promises.keep(asked, 100.0 + first)


def test_several_answers_to_one_question_have_a_time_each() -> None:
    promises, asked = Promises(3600.0), submitted(1)
    times = [told(promises, asked, 100.0 + REPEATED_S / 10 * copy) for copy in range(4)]
    assert len(promises) == len(set(times)) == 4
    again = [told(promises, asked, 101.0 + REPEATED_S / 10 * copy) for copy in range(4)]
    assert again == [one - 1.0 for one in times]
    assert told(promises, asked, 101.1) not in again, "a fifth"


def test_who_asks_the_same_later_has_a_time_of_its_own() -> None:
    """It is somebody else as well as not, and both must find what they were told."""
    promises, asked = Promises(3600.0), submitted(1)
    first = 100.0 + told(promises, asked, 100.0)
    now = 100.0 + INSISTS_S + 0.1
    second = now + told(promises, asked, now)
    assert first != second
    assert promises.keep(asked, first)
    assert promises.keep(asked, second)


def test_who_was_taken_before_its_time_is_not_expected_any_more() -> None:
    promises, early, other = Promises(3600.0), submitted(1), submitted(2)
    told(promises, early, 100.0)
    at = 100.0 + told(promises, other, 100.0)
    promises.took(early, 100.1)  # another client, with the same question at the same time
    assert len(promises) == 2
    promises.took(early, 102.0)
    promises.took(early, 103.0)
    assert len(promises) == 1
    assert promises.keep(other, at)
    promises.expire(500.0)
    assert told(promises, early, 500.0) == told(Promises(3600.0), early, 500.0), "nobody failed to come"


def test_the_scheduler_says_who_was_taken() -> None:
    world = Refusing()
    early = msgspec.structs.replace(submitted(10), on_miss="serve")
    told(world.core.door.promises, early, world.now)
    world.now += 1.0
    assert isinstance(world.core.door.decide(early, world.core, world.now), Admitted)
    assert len(world.core.door.promises) == 0
