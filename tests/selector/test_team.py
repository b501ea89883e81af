"""Who drafts together where drafters share processors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selector.flotilla import Flotilla
from selector.protocol import DrafterView, PoolView, RequestView
from selector.sharing import Sharing
from selector.team import BatchCosts, ShareCosts, Team, TeamSearch

KINDS = ("a", "b", "c")


@dataclass
class Costs:
    """A machine on which every layer of a drafter has a fixed part and one per request."""

    fixed_s: float = 3e-4
    request_s: float = 3e-5
    drafters_at_once: int = 1

    @property
    def sharing(self) -> Sharing:
        return Sharing(at_once={"": self.drafters_at_once})

    def step_s(self, num_requests: int, depth: int, num_context: int) -> float:
        return 3e-3 + 1.2e-4 * num_requests * (1 + depth)

    def draft_s(self, kind: str, num_requests: int, depth: int, num_context: int) -> float:
        return depth * (self.fixed_s + self.request_s * num_requests)

    def verify_s(self, num_context: int) -> float:
        return 3e-3

    def token_s(self, num_context: int) -> float:
        return 1.2e-4

    def layer_s(self, kind: str, num_context: int) -> float:
        return self.fixed_s + self.request_s

    def rebuild_s(self, kind: str, num_tokens: int) -> float:
        return 1e-4 * num_tokens


def search(
    rates: list[list[float]],
    costs: Costs,
    reading_s: float = 0.0,
    stays: int | None = None,
    places: Sequence[int] = (256,) * len(KINDS),
) -> TeamSearch:
    table = np.array(rates)
    reading = np.full(table.shape, reading_s)
    if stays is not None:
        reading[:, stays] = 0.0
    kinds = KINDS[: table.shape[1]]
    return TeamSearch(kinds, table, reading, places[: len(kinds)], 100 * len(rates), costs, 6)


rate = st.floats(0.0, 0.98)


@given(st.lists(st.tuples(rate, rate, rate), min_size=1, max_size=12), st.integers(1, 3), st.floats(0, 2e-3))
def test_no_single_kind_is_better_and_no_further_one_pays(
    rates: list[tuple[float, float, float]], at_once: int, fixed_s: float
) -> None:
    """Forward selection stops where one more kind brings less than 1 %."""
    found = search([list(row) for row in rates], Costs(fixed_s, drafters_at_once=at_once))
    best = found.best()
    singles = [found.evaluate((kind,)).goodput for kind in KINDS]
    assert best.goodput >= max(singles)
    assert sum(best.counts.values()) == len(rates)
    if len(best.counts) == 1:
        (alone,) = best.counts
        for other in KINDS:
            assert found.evaluate({alone, other}).goodput <= 1.01 * best.goodput + 1e-9


def test_on_shared_processors_a_little_better_is_no_reason_to_draft_apart() -> None:
    rates = [[0.8, 0.7], [0.7, 0.75]] * 4
    assert set(search(rates, Costs()).best().counts) == {"a"}
    apart = search(rates, Costs(drafters_at_once=2)).best()
    assert apart.counts == {"a": 4, "b": 4}


def test_much_better_is_a_reason() -> None:
    rates = [[0.9, 0.1], [0.1, 0.9]] * 4
    assert search(rates, Costs()).best().counts == {"a": 4, "b": 4}


def test_a_team_stays_unless_another_is_clearly_better() -> None:
    rates = [[0.80, 0.81]] * 8
    found = search(rates, Costs())
    assert set(found.best().counts) == {"b"}
    assert set(found.best(("a",)).counts) == {"a"}
    clearly = search([[0.6, 0.9]] * 8, Costs())
    assert set(clearly.best(("a",)).counts) == {"b"}


def test_reading_weighs_against_moving() -> None:
    rates = [[0.6, 0.8]] * 8
    assert set(search(rates, Costs()).best(("a",)).counts) == {"b"}
    assert set(search(rates, Costs(), reading_s=5e-3, stays=0).best(("a",)).counts) == {"a"}


def test_who_may_use_nobody_is_not_served_and_without_kinds_nobody_is() -> None:
    found = search([[-1.0], [0.8]], Costs())
    assert found.evaluate(("a",)).counts == {"a": 1}
    assert found.evaluate(()) == Team({}, pytest.approx(2 / Costs().step_s(2, 0, 0)), 0)
    assert not search([[-1.0], [-1.0]], Costs()).best().counts


@given(
    st.lists(st.tuples(rate, rate, rate), min_size=1, max_size=12),
    st.tuples(*[st.integers(0, 8)] * 3),
    st.sets(st.sampled_from(KINDS)),
)
def test_nobody_is_left_out_while_any_kind_has_a_place(
    rates: list[tuple[float, float, float]], places: tuple[int, int, int], before: set[str]
) -> None:
    found = search([list(row) for row in rates], Costs(), places=places).best(before)
    assert sum(found.counts.values()) == min(len(rates), sum(places))
    assert all(found.counts[kind] <= places[KINDS.index(kind)] for kind in found.counts)


def test_too_few_places_go_to_the_surest_and_the_others_to_the_next_best() -> None:
    found = search([[0.9, 0.5], [0.8, 0.7], [0.7, 0.1]], Costs(), places=(2, 2)).evaluate(("a", "b"))
    assert found.counts == {"a": 2, "b": 1}
    one = search([[0.9, 0.5], [0.8, 0.7]], Costs(), places=(1, 1))
    alone = search([[0.9, -1.0], [-1.0, 0.7]], Costs())
    assert one.evaluate(("a", "b")).goodput == pytest.approx(alone.evaluate(("a", "b")).goodput)


def test_where_a_team_has_too_few_places_others_draft_too() -> None:
    """Half of the requests had no drafter, while another was idle."""
    drafters = {kind: DrafterView(kind, kind, 4, 0, 0) for kind in KINDS[:2]}
    requests = [RequestView(f"r{i}", "", ("a", "b"), 10, 10, 1000, 0) for i in range(8)]
    selector = Flotilla()
    few = selector.assign(requests[:4], PoolView(drafters, Costs(), 6))
    assert len(set(few.values())) == 1
    chosen = selector.assign(requests[:5], PoolView(drafters, Costs(), 6))
    assert sorted(map(len, chosen.values())) == [1] * 5, "at once, and not when the team is looked at again"
    chosen = selector.assign(requests, PoolView(drafters, Costs(), 6))
    assert sorted(chosen.values()) == ["a"] * 4 + ["b"] * 4


def test_shares_add_up_to_the_step() -> None:
    costs = Costs(drafters_at_once=1)
    assert isinstance(costs, BatchCosts)
    team = Team({"a": 4, "b": 4}, 0.0, 3)
    share = ShareCosts(costs, costs, 8, team)
    assert 8 * share.verify_s(100) == pytest.approx(costs.step_s(8, 0, 800))
    assert share.token_s(100) == pytest.approx(1.2e-4)
    # Four each, one drafter after the other; then both at the same time.
    layers_s = 4 * share.layer_s("a", 100) + 4 * share.layer_s("b", 100)
    both_s = costs.draft_s("a", 4, 1, 0) + costs.draft_s("b", 4, 1, 0)
    assert layers_s == pytest.approx(both_s)
    at_once = Costs(drafters_at_once=2)
    assert 8 * ShareCosts(at_once, at_once, 8, team).layer_s("a", 100) == pytest.approx(both_s / 2)
    assert share.rebuild_s("a", 50) == pytest.approx(5e-3)
