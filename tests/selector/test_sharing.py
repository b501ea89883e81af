"""How long draft calls of several kinds take that share processors, or do not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selector.sharing import Sharing
from selector.team import TeamSearch
from tests.selector.test_team import Costs

KINDS = ("a", "b", "c", "d")


class Placed(Costs):
    """Costs of a machine whose kinds are placed so."""

    def __init__(self, placed: Sharing) -> None:
        super().__init__()
        self.placed = placed

    @property
    def sharing(self) -> Sharing:
        return self.placed


def test_kinds_of_one_group_wait_for_each_other_and_those_of_others_do_not() -> None:
    sharing = Sharing({"gpu": "GPU of gpu"}, {"": 1, "GPU of gpu": 1})
    assert sharing.seconds({"a": 2.0, "b": 3.0, "gpu": 4.0}, {}) == 5.0
    assert sharing.seconds({"a": 2.0, "b": 3.0, "gpu": 6.0}, {}) == 6.0
    assert sharing.seconds({"a": 2.0, "b": 3.0, "gpu": 4.0}, {"gpu": 3.0}) == 7.0
    assert sharing.num_at_once(("a", "b", "gpu")) == 2
    assert sharing.num_at_once(()) == 1


@given(
    st.dictionaries(st.sampled_from(KINDS), st.floats(0.01, 10.0), min_size=1),
    st.dictionaries(st.sampled_from(KINDS), st.sampled_from("xyz")),
    st.dictionaries(st.sampled_from(["", "x", "y", "z"]), st.integers(1, 3)),
)
def test_no_sharing_is_the_slowest_and_all_on_one_the_sum(
    calls_s: dict[str, float], group_of: dict[str, str], at_once: dict[str, int]
) -> None:
    seconds = Sharing(group_of, at_once).seconds(calls_s, {})
    assert Sharing({kind: kind for kind in KINDS}).seconds(calls_s, {}) == max(calls_s.values())
    assert Sharing().seconds(calls_s, {}) == pytest.approx(sum(calls_s.values()))
    assert max(calls_s.values()) <= seconds <= sum(calls_s.values()) + 1e-9
    assert 1 <= Sharing(group_of, at_once).num_at_once(calls_s) <= len(calls_s)


def test_who_has_processors_of_its_own_joins_a_team_that_another_would_delay() -> None:
    rates = np.array([[0.8, 0.7], [0.7, 0.75]] * 4)
    teams = {}
    for name, group_of in (("shared", {}), ("apart", {"b": "GPU of b"})):
        costs = Placed(Sharing(group_of))
        teams[name] = TeamSearch(("a", "b"), rates, np.zeros(rates.shape), [8, 8], 800, costs, 6).best()
    assert teams["shared"].counts == {"a": 8}
    assert teams["apart"].counts == {"a": 4, "b": 4}
    assert teams["apart"].goodput > teams["shared"].goodput
