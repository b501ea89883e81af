"""Whether drafters read prompts, by how many requests run at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.proposing import FEW_REQUESTS, LEAST, Proposing

SIZES = st.integers(FEW_REQUESTS + 1, 256)


def test_at_first_everything_is_read() -> None:
    assert all(Proposing().pays(number) for number in (1, 7, 300))


@given(SIZES, SIZES)
def test_what_does_not_pay_for_some_does_not_for_more_and_says_nothing_of_fewer(one: int, other: int) -> None:
    proposing = Proposing()
    for _ in range(40):
        proposing.planned(one, 0.0)
    assert not proposing.pays(one)
    assert proposing.pays(other) == (other.bit_length() < one.bit_length())


def test_the_end_of_a_burst_does_not_have_the_next_one_read() -> None:
    """Bursts of eight that end one by one: drafts pay for the last two, and never for eight."""
    proposing = Proposing()
    for _ in range(40):
        for _ in range(12):
            proposing.planned(8, 0.0)
        for _ in range(12):
            proposing.planned(2, 1.0)
    assert not proposing.pays(8)
    assert proposing.pays(2)


def test_prompts_of_a_request_alone_are_always_read() -> None:
    """That drafts did not pay for the one before says nothing of this one, and reading costs an idle core."""
    proposing = Proposing()
    for _ in range(100):
        proposing.planned(1, 0.0)
    assert proposing.pays(1)


def test_it_is_noticed_that_drafts_pay_again() -> None:
    proposing = Proposing()
    for _ in range(40):
        proposing.planned(8, 0.0)
    for _ in range(4):
        proposing.planned(8, 1.0)
    assert proposing.pays(8)


def test_a_step_in_which_the_policy_rests_counts_less_than_one_in_which_it_looked() -> None:
    rested, planned = Proposing(), Proposing()
    for _ in range(20):
        rested.rested(8)
        planned.planned(8, 0.0)
    assert planned.share(8) < LEAST < rested.share(8) < 1.0
