"""A worker without a scheduler waits if it was told to, and no longer than it was told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.worker_lease import Lease

PATIENCE_S = 60.0


def lease() -> Lease:
    return Lease(PATIENCE_S, heard_at=0.0)


def test_a_worker_that_nobody_waits_for_ends_with_its_connection() -> None:
    one = lease()
    assert not one.is_over(1.0, is_connected=True)
    assert one.is_over(1.1, is_connected=False)


def test_also_while_it_is_loaded() -> None:
    one = lease()
    one.is_busy = True
    assert not one.is_over(1.0, is_connected=True)
    assert one.is_over(1.1, is_connected=False)


def test_one_that_may_be_taken_over_waits_from_when_it_was_last_connected() -> None:
    one = lease()
    one.is_kept = True
    assert not one.is_over(500.0, is_connected=True)
    assert not one.is_over(500.0 + PATIENCE_S, is_connected=False)
    assert one.is_over(500.1 + PATIENCE_S, is_connected=False)


def test_before_the_first_connection_signs_of_the_cell_and_long_calls_keep_it() -> None:
    one = lease()
    assert not one.is_over(PATIENCE_S, is_connected=False)
    one.heard(PATIENCE_S)
    assert not one.is_over(2 * PATIENCE_S, is_connected=False)
    one.is_busy = True
    assert not one.is_over(10 * PATIENCE_S, is_connected=False)
    one.is_busy = False
    assert not one.is_over(11 * PATIENCE_S, is_connected=False)
    assert one.is_over(11.1 * PATIENCE_S, is_connected=False)


def test_who_took_it_over_has_the_same_time_to_connect_and_must_say_again_that_it_may_wait() -> None:
    one = lease()
    one.is_kept = True
    one.is_over(1.0, is_connected=True)
    one.renew(50.0)
    assert not one.is_over(50.0 + PATIENCE_S, is_connected=False)
    assert not one.is_over(51.0 + PATIENCE_S, is_connected=True)
    assert one.is_over(51.1 + PATIENCE_S, is_connected=False)


@given(st.lists(st.tuples(st.floats(0.01, 100.0), st.booleans(), st.booleans()), max_size=30))
def test_it_ends_exactly_when_it_has_been_alone_for_too_long(steps: list[tuple[float, bool, bool]]) -> None:
    """An independent account: seconds alone since the last sign, and whether waiting was ever worth it."""
    one, now, alone_since, was_connected, kept = lease(), 0.0, 0.0, False, False
    for seconds, is_connected, keep in steps:
        now += seconds
        if keep:
            one.is_kept = kept = True
        expected = not is_connected and ((was_connected and not kept) or now - alone_since > PATIENCE_S)
        assert one.is_over(now, is_connected) == expected
        if expected:
            return
        if is_connected:
            was_connected, alone_since = True, now
