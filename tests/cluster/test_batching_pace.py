"""What is believed of an iteration besides its forward."""

from __future__ import annotations

import pytest

from cluster.batching.pace import Pace
from cluster.running_mean import RunningMean


@pytest.mark.parametrize("profile_s", [0.0, 1e-3])
def test_what_iterations_take_is_learnt_whatever_the_profile_says(profile_s: float) -> None:
    """A profile that has nothing beside forwards was believed for ever: tenfold of nothing is nothing."""
    pace = Pace(RunningMean(profile_s))
    for _ in range(60):
        pace.iterated(4e-3)
    assert pace.beside_s.value == pytest.approx(4e-3, rel=0.05)
    pace.iterated(5.0)
    assert pace.beside_s.value < 9e-3
