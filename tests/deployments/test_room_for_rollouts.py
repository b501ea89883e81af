"""A Ray that `flotilla serve` began has what the first configuration reserved: what needs more is refused."""

from __future__ import annotations

import pytest
from rich.console import Console

from cluster.config import FlotillaConfig
from deployments import ray_start, serving
from deployments.demo import demo_config
from deployments.preflight import StartError


def changed(**sections: object) -> FlotillaConfig:
    return FlotillaConfig.model_validate(demo_config().model_dump(mode="json") | sections)


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(serving.ray, "nodes", lambda: [{"Resources": {"CPU": 2.0}}])


@pytest.mark.parametrize(
    ("sections", "missing"),
    [
        ({"scaling": {"cells": {"min": 3, "max": 3}}}, r"3 CPU \(it has 2\) for all cells and front ends"),
        (
            {"target": {"path": "zoo:target-8x384", "placement": {"num_gpus": 1}}},
            r"1 GPU \(it has 0\) for verifier rank 0",
        ),
    ],
)
def test_cells_that_would_wait_for_ever_are_refused(
    sections: dict[str, object], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three came, and the rollout never ended, where a start with that file takes what it needs."""
    with pytest.raises(StartError, match=f"lacks {missing}, so nothing is changed"):
        serving._fitting(changed(**sections))
    monkeypatch.setenv("RAY_ADDRESS", "auto")  # one that may grow
    serving._fitting(changed(**sections))


def test_what_fits_once_the_old_cells_are_gone_is_rolled_out() -> None:
    config = changed(scaling={"cells": {"min": 2, "max": 2}})
    assert serving._fitting(config) is config


def test_a_ray_on_this_machine_that_nobody_named_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray takes one of `ray start` unless told not to, and then refuses to be told of processors."""
    began: list[str] = []
    monkeypatch.setattr(ray_start.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_start.ray, "init", lambda address=None, **options: began.append(address))
    monkeypatch.setenv("PYTHONPATH", "")  # put back afterwards: it is added to
    for changing in ("take_on", "use_ordinary_priority"):
        monkeypatch.setattr(ray_start, changing, lambda: None)
    ray_start.start_ray(changed(drafters=[]), Console())
    assert began == ["local"]
