"""The greedy drafter choice: goodput, capacity, hysteresis, determinism."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.greedy_choice import Candidate, choose, goodput, most_promising


def candidate(name: str, rate: float, draft_s: float = 1e-3, load: int = 0, capacity: int = 4) -> Candidate:
    return Candidate(name=name, rate=rate, draft_s=draft_s, load=load, capacity=capacity)


def pick(candidates: list[Candidate], current: str = "") -> str:
    return choose(candidates, current, verify_s=0.01, token_s=4e-4, max_depth=6)


def test_a_cheaper_drafter_wins_at_equal_acceptance() -> None:
    assert pick([candidate("slow", 0.7, 3e-3), candidate("fast", 0.7, 1e-3)]) == "fast"


def test_a_full_drafter_is_passed_over_but_keeps_its_own() -> None:
    full = candidate("best", 0.9, load=4)
    other = candidate("other", 0.6)
    assert pick([full, other]) == "other"
    assert pick([full, other], current="best") == "best"


def test_a_small_advantage_does_not_move_a_request() -> None:
    here, there = candidate("here", 0.70), candidate("there", 0.705)
    assert pick([here, there], current="here") == "here"
    assert pick([here, candidate("there", 0.95)], current="here") == "there"


def test_nobody_with_room_is_nobody() -> None:
    assert pick([candidate("full", 0.9, load=4)]) == ""


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(1e-4, 1e-2)), min_size=1, max_size=6), st.randoms())
def test_the_choice_is_the_best_and_does_not_depend_on_order(pairs: list, rng) -> None:  # type: ignore[no-untyped-def,type-arg]
    candidates = [candidate(f"d{i}", rate, draft_s) for i, (rate, draft_s) in enumerate(pairs)]
    shuffled = list(candidates)
    rng.shuffle(shuffled)
    chosen = pick(candidates)
    assert pick(shuffled) == chosen
    values = {c.name: goodput(c, 0.01, 4e-4, 6) for c in candidates}
    assert values[chosen] == max(values.values())


def test_only_who_could_be_better_is_worth_finding_out_about() -> None:
    to_beat = goodput(candidate("here", 0.7), 0.01, 4e-4, 6)
    rivals = [candidate("a", 0.5), candidate("b", 0.9), candidate("c", 0.8)]
    assert most_promising(rivals, to_beat, 0.01, 4e-4, 6) == "b"
    assert most_promising(rivals[:1], to_beat, 0.01, 4e-4, 6) == ""
    assert most_promising([], 0.0, 0.01, 4e-4, 6) == ""
