"""SPIN's schedule, slot by slot."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from selector.assignment import match
from selector.lbss import Lbss
from selector.protocol import Outcome, PoolView
from tests.selector.selector_world import Costs, World, drafter

RATES = {"small": (50.0, 90.0, 40.0), "middle": (60.0, 50.0, 70.0), "large": (40.0, 60.0, 80.0)}


def world(alpha: int = 12, beta: int = 3, num_requests: int = 3, seed: int = 0) -> World:
    made = World(Lbss(alpha, beta, seed=seed))
    made.add(drafter("small"), drafter("middle"), drafter("large"))
    for number in range(num_requests):
        made.arrive(f"r{number}")
    return made


def report(made: World, chosen: dict[str, str]) -> None:
    made.selector.observe(
        [
            Outcome(name, place, int(RATES[place][int(name[1:]) % 3]), 1, 1.0)
            for name, place in chosen.items()
            if place
        ]
    )


def test_the_schedule_is_the_papers() -> None:
    made = world()
    selector = made.selector
    assert isinstance(selector, Lbss)
    stages = []
    places = []
    for _ in range(3 * 12 + 2 + 4 + 8):
        chosen = made.step()
        report(made, chosen)
        stages.append((selector.epoch, selector.is_exploring))
        places.append(chosen)
    expected = []
    for epoch in (1, 2, 3):
        expected += [(epoch, True)] * 12 + [(epoch, False)] * 2**epoch
    assert stages == expected
    # A drafter lasts for a chunk of 3 slots, and for all of exploitation.
    starts = {0, 3, 6, 9, 12, 14, 17, 20, 23, 26, 30, 33, 36, 39, 42}
    changes = {slot for slot in range(1, len(places)) if places[slot] != places[slot - 1]}
    assert changes <= starts
    assert len(changes) > 8


def test_exploitation_is_the_matching_on_exploration_averages() -> None:
    made = world(alpha=60, beta=2)
    selector = made.selector
    assert isinstance(selector, Lbss)
    for _ in range(60):
        report(made, made.step())
    chosen = made.step()
    names = ["large", "middle", "small"]
    weights = np.array([[selector.estimate(f"r{i}", kind) for kind in names] for i in range(3)])
    assert weights == pytest.approx(np.array([[RATES[kind][i] for kind in names] for i in range(3)]))
    best = match(weights, np.full(3, 2)).columns
    assert chosen == {f"r{i}": names[best[i]] for i in range(3)}
    before = dict(selector.prices())
    selector.observe([Outcome("r0", chosen["r0"], 1000, 1, 1.0)])
    assert selector.estimate("r0", chosen["r0"]) < 100.0  # exploitation does not count
    assert before == {"large": 0.0, "middle": 0.0, "small": 0.0}


def test_who_has_seen_no_goodput_yet_has_a_drafter_all_the_same() -> None:
    """As where every drafter was still reading while it explored: without one nothing would ever be seen."""
    made = world(alpha=4, beta=2)
    for _ in range(4):
        made.step()
    assert all(made.step().values())


def test_a_last_chunk_is_shorter_if_beta_does_not_divide_alpha() -> None:
    made = world(alpha=7, beta=3, num_requests=1)
    places = [made.step()["r0"] for _ in range(7)]
    assert places[0] == places[1] == places[2]
    assert places[3] == places[4] == places[5]


def test_who_draws_a_full_drafter_is_dropped_at_random() -> None:
    made = world(alpha=400, beta=1, num_requests=8)
    without = []
    for _ in range(400):
        chosen = made.step()
        without += [name for name, place in chosen.items() if not place]
    counts = [without.count(f"r{number}") for number in range(8)]
    assert min(counts) > 0.6 * max(counts)
    assert sum(counts) > 400


def test_a_latecomer_explores_by_itself_and_is_then_matched() -> None:
    made = world(alpha=12, beta=3)
    selector = made.selector
    assert isinstance(selector, Lbss)
    while not (selector.epoch == 6 and not selector.is_exploring):
        report(made, made.step())
    settled = made.step()
    made.arrive("r9")
    seen = []
    for _ in range(12):
        chosen = made.step()
        report(made, chosen)
        seen.append(chosen["r9"])
        assert {name: chosen[name] for name in settled} == settled
    assert len(set(seen)) > 1
    assert all(a == b for at, (a, b) in enumerate(pairwise(seen)) if at % 3 != 2)
    assert made.step()["r9"] == made.step()["r9"] != ""


def place(made: World, name: str) -> None:
    """The request gets a drafter, which reads it; it does not draft yet."""
    (view,) = (replace(view, is_drafting=False) for view in made.views() if view.request_id == name)
    chosen = made.selector.assign([view], made.pool())
    made.requests[name] = replace(made.requests[name], current=chosen[name])


@given(st.integers(0, 20), st.integers(0, 11), st.integers(1, 3))
def test_who_is_only_read_spends_no_slot(seed: int, before: int, times: int) -> None:
    """SPIN's slots are steps that draft: also the first chunk of a latecomer has all of them."""
    made, undisturbed = world(alpha=12, beta=3, seed=seed), world(alpha=12, beta=3, seed=seed)
    selector, other = made.selector, undisturbed.selector
    assert isinstance(selector, Lbss)
    assert isinstance(other, Lbss)
    seen = []
    for step in range(before + 13):
        if step == before:
            made.arrive("r9")
            for _ in range(times):
                place(made, "r9")
            read_by = made.requests["r9"].current
        chosen = made.step()
        report(made, chosen)
        undisturbed.step()
        assert (selector.epoch, selector.slots_left) == (other.epoch, other.slots_left)
        seen.append(chosen.get("r9", ""))
    of_latecomer = seen[before:]
    assert of_latecomer[0] == read_by
    # Until the next epoch, or until it is matched, it changes after whole chunks alone.
    until = 12 - before
    changes = [at for at in range(1, until) if of_latecomer[at] != of_latecomer[at - 1]]
    assert all(at % 3 == 0 for at in changes)


@given(st.integers(0, 20), st.integers(0, 30), st.integers(0, 2))
def test_who_loses_its_drafter_while_it_is_verified_spends_no_slot(
    seed: int, before: int, number: int
) -> None:
    made = world(alpha=12, beta=3, seed=seed)
    selector = made.selector
    assert isinstance(selector, Lbss)
    for _ in range(before + 1):
        made.step()
    now = (selector.epoch, selector.is_exploring, selector.slots_left)
    name = f"r{number}"
    if made.requests[name].current:
        made.lose(made.requests[name].current)
    place(made, name)
    assert (selector.epoch, selector.is_exploring, selector.slots_left) == now


@pytest.mark.parametrize("change", ["leaves", "comes"])
@pytest.mark.parametrize("is_first_asked", [False, True])
def test_who_exploits_is_matched_anew_whoever_is_asked_about_first(change: str, is_first_asked: bool) -> None:
    """Between a request's end and the next slot, one that waited is admitted and asked about by itself."""
    made = World(Lbss(4, 1))
    made.add(drafter("good", capacity=1), drafter("poor"), drafter("other"))
    for name in ("r0", "r1", "r2"):
        made.arrive(name, allowed=("good", "poor", "better"))
    selector = made.selector
    assert isinstance(selector, Lbss)
    while selector.epoch < 5 or selector.is_exploring:
        chosen = made.step()
        selector.observe(
            [Outcome(name, at, 90 if at == "good" else 40, 1, 1.0) for name, at in chosen.items() if at]
        )
    (served,) = (name for name, at in chosen.items() if at == "good")
    if change == "leaves":
        made.leave(served)
        expected = ["good", "poor"]
    else:
        made.add(drafter("better", kind="good", capacity=1))
        expected = ["better", "good", "poor"]
    if is_first_asked:
        made.arrive("r9", allowed=("other",))
        place(made, "r9")
    for _ in range(2):  # and there they stay
        chosen = made.step()
        chosen.pop("r9", None)
        assert sorted(chosen.values()) == expected


def test_the_destination_of_the_next_chunk_is_known() -> None:
    made = world(alpha=30, beta=3, num_requests=1)
    for _ in range(3):
        made.step()
    for _ in range(9):
        view = made.views()[0]
        expected = made.selector.destination(view, made.pool()) or view.current
        assert made.step()["r0"] == expected
        made.step()
        made.step()


def test_one_slot_is_one_step_of_everybody_also_in_micro_batches() -> None:
    made = world(alpha=4, beta=2, num_requests=4)
    selector = made.selector
    assert isinstance(selector, Lbss)
    for slot in range(4):
        views = made.views()
        for half in (views[:2], views[2:]):
            selector.assign(half, PoolView(made.pool().drafters, Costs(), 6))
            assert selector.slots_left == 4 - slot


def test_switches_are_charged_by_the_reading_they_cost() -> None:
    selectors = [Lbss(40, 1, switching_weight=weight) for weight in (1.0, 3.0)]
    for selector in selectors:
        made = World(selector)
        made.add(drafter("small"), drafter("large"))
        made.arrive("r0")
        for _ in range(40):
            made.step()
    first, second = selectors
    assert first.num_switches == second.num_switches > 5
    assert second.switching_cost == pytest.approx(3 * first.switching_cost)
    assert first.switching_cost > 0.0


@pytest.mark.parametrize(("alpha", "beta"), [(4, 5), (4, 0)])
def test_a_chunk_fits_its_stage(alpha: int, beta: int) -> None:
    with pytest.raises(ValueError, match="beta must be from 1"):
        Lbss(alpha, beta)
