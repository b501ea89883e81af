"""What holds of every selector: capacities, wishes, drafters and requests that come and go."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from selector.protocol import Explores, Outcome
from selector.registry import SELECTORS, make_selector
from tests.examples import examples
from tests.selector.selector_world import World, drafter

KINDS = ("small", "middle", "large")


def run_story(name: str, story: list[tuple[str, int]], seed: int = 0) -> list[dict[str, str]]:
    """Apply events; `World.step` checks each assignment."""
    made = World(make_selector(name, alpha=6, beta=2, seed=seed))
    made.add(drafter("small-1", "small", 2, 1), drafter("small-2", "small", 1, 1))
    made.add(drafter("middle-1", "middle", 2, 2), drafter("large-1", "large", 1, 3))
    rng = np.random.default_rng(seed)
    log = []
    for number, (event, choice) in enumerate(story):
        if event == "arrive":
            allowed = () if choice % 3 else ("small-2", "large-1")
            made.arrive(f"r{number}", 5 + choice, allowed)
        elif event == "leave" and made.requests:
            made.leave(sorted(made.requests)[choice % len(made.requests)])
        elif event == "lose" and made.drafters:
            made.lose(sorted(made.drafters)[choice % len(made.drafters)])
        elif event == "add":
            kind = KINDS[choice % 3]
            made.add(drafter(f"{kind}-{number}", kind, 1 + choice % 2, choice % 3))
        for _ in range(1 + choice % 4):
            chosen = made.step()
            log.append(chosen)
            outcomes = []
            for request_id, place in chosen.items():
                kind = made.drafters[place].kind if place else ""
                tokens = 1 + int(rng.integers(4)) if place else 1
                outcomes.append(Outcome(request_id, kind, tokens, 4 if place else 0, 0.03))
                if place:
                    made.selector.score(request_id, kind, tokens, tokens - 1)
            made.selector.observe(outcomes)
            assert all(price >= 0.0 for price in made.selector.prices().values())
            for view in made.views():
                move = made.selector.destination(view, made.pool())
                assert move == "" or (move in made.drafters and move in view.allowed)
                if isinstance(made.selector, Explores):
                    for has_ended in (False, True):
                        asked = made.selector.explore(view, made.pool(), has_ended=has_ended)
                        assert asked == "" or (asked in made.drafters and asked in view.allowed)
    return log


EVENTS = st.lists(
    st.tuples(st.sampled_from(["arrive", "arrive", "leave", "lose", "add", "wait"]), st.integers(0, 11)),
    min_size=3,
    max_size=14,
)


@pytest.mark.parametrize("name", SELECTORS)
@examples(12)
@given(story=EVENTS, seed=st.integers(0, 3))
def test_capacities_and_wishes_hold_whatever_comes_and_goes(
    name: str, story: list[tuple[str, int]], seed: int
) -> None:
    assert run_story(name, story, seed) == run_story(name, story, seed)


@pytest.mark.parametrize("name", SELECTORS)
def test_a_lost_drafters_requests_move_on_within_the_step(name: str) -> None:
    made = World(make_selector(name, alpha=8, beta=8))
    made.add(drafter("small-1", "small", 8), drafter("small-2", "small", 8))
    for number in range(6):
        made.arrive(f"r{number}")
    for _ in range(4):
        made.step()
    lost = next(iter(made.step().values()))
    made.lose(lost)
    (left,) = made.drafters
    assert set(made.step().values()) == {left}


@pytest.mark.parametrize("name", ["flotilla", "fixed", "greedy-length"])
def test_who_is_well_served_stays_when_others_come(name: str) -> None:
    made = World(make_selector(name))
    made.add(drafter("small-1", "small", 4), drafter("small-2", "small", 4))
    made.arrive("first")
    place = made.step()["first"]
    for number in range(7):
        made.arrive(f"r{number}")
        assert made.step()["first"] == place


def test_shorter_prompts_get_smaller_drafters_in_proportion_to_capacity() -> None:
    made = World(make_selector("greedy-length"))
    made.add(drafter("big", capacity=4, size=3), drafter("tiny", capacity=8, size=1))
    for length in (60, 10, 50, 30, 20, 40):
        made.arrive(f"r{length}", length)
    chosen = made.step()
    assert [chosen[f"r{length}"] for length in (10, 20, 30, 40, 50, 60)] == ["tiny"] * 4 + ["big"] * 2


def test_fixed_uses_only_whom_it_was_told_and_spreads() -> None:
    made = World(make_selector("fixed", drafters=["small"]))
    made.add(drafter("small-1", "small", 3), drafter("small-2", "small", 3), drafter("large", capacity=9))
    for number in range(8):
        made.arrive(f"r{number}")
    places = list(made.step().values())
    assert sorted(places) == ["", "", *["small-1"] * 3, *["small-2"] * 3]


def test_epsilon_is_the_share_of_slots_that_explore() -> None:
    made = World(make_selector("epsilon-greedy", epsilon=0.2))
    made.add(drafter("small", capacity=9), drafter("large", capacity=9))
    made.arrive("r0")
    places = []
    for _ in range(2000):
        (place,) = made.step().values()
        places.append(place)
        made.selector.observe([Outcome("r0", place, 3 if place == "large" else 1, 4, 1.0)])
    assert places[20:].count("small") / 1980 == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_between_slots_epsilon_greedy_moves_nobody(epsilon: float) -> None:
    """As when a policy looks ahead: what is moved then only reads, and is moved again by the slot's coin."""
    made = World(make_selector("epsilon-greedy", epsilon=epsilon))
    made.add(drafter("small", capacity=9), drafter("large", capacity=9))
    for number in range(8):
        made.arrive(f"r{number}")
    before = made.step()
    made.selector.observe([Outcome(name, "small", 1, 4, 1.0) for name in before])
    for _ in range(4):
        views = [replace(view, is_drafting=False) for view in made.views()]
        assert made.selector.assign(views, made.pool()) == before


def test_an_unknown_name_is_told_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"'best'; there are: flotilla, lbss"):
        make_selector("best")
