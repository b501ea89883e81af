"""The plot of a cost profile, of forwards made up."""

from __future__ import annotations

from pathlib import Path

from cluster.linear_cost import LinearCost, StepPoint
from cluster.profile_file import FitQuality, ModelIdentity, ModelProfile, new_profile
from deployments.profile_plot import plot_profile


def test_names_are_text_and_no_formulas(tmp_path: Path) -> None:
    r"""`$\a$` is a formula that matplotlib does not know: drawing it raised after all had been measured."""
    model = ModelProfile(
        model=ModelIdentity(kind="model", path="here", config_hash=""),
        cost=LinearCost(gamma=1e-3, delta=1e-3),
        quality=FitQuality(num_fitted=1, num_held_out=1, median=0.1, p90=0.1, worst=0.1),
        points=[StepPoint(1, 1, 8, 2e-3), StepPoint(1, 4, 8, 5e-3)],
        held_out=[True, False],
    )
    plot = tmp_path / "plot.png"
    plot_profile(new_profile("wall", model, {r"$\a$": model}), plot)
    assert plot.read_bytes().startswith(b"\x89PNG")
