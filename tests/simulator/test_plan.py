"""Sizing: the search for the highest rate, and the plan as values of the chart."""

from __future__ import annotations

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.objectives import Limit, SloSpec
from cluster.config import FlotillaConfig
from cluster.placement import plan_cell
from simulator import chart_values, hardware, systems
from simulator.plan_cli import app
from simulator.sizing import LEAST_RATE, PRECISION, Load, Sizing, highest_rate, least_attainment, size

FLOTILLA = systems.parse("flotilla")
IMPOSSIBLE = {"*": SloSpec(tpot=Limit(0.01))}


@given(limit=st.floats(LEAST_RATE, 2000.0))
def test_the_highest_rate_is_found_to_the_precision(limit: float) -> None:
    asked = []

    def attains(rate: float) -> bool:
        asked.append(rate)
        return rate <= limit

    found = highest_rate(attains, LEAST_RATE)
    assert found <= limit <= found * (1.0 + PRECISION) * (1.0 + 1e-9)
    assert len(asked) <= 24


def test_where_nothing_attains_there_is_no_rate() -> None:
    assert highest_rate(lambda _: False, LEAST_RATE) == 0.0


def an_impossible_load() -> tuple[hardware.HardwareProfile, Load, Sizing]:
    profile, load = hardware.load("llama-8b-h200"), Load(slos=IMPOSSIBLE)
    return profile, load, size(profile, systems.parse("flotilla"), load, 1.0, seconds=1.0, seeds=(0,))


def test_an_objective_out_of_reach_needs_no_number_of_cells() -> None:
    profile, load, sizing = an_impossible_load()
    assert (sizing.cell_rate, sizing.num_cells) == (0.0, 0)
    assert least_attainment(sizing.at_capacity) == 0.0
    with pytest.raises(ValueError, match="nothing to install"):
        chart_values.values(profile, load, FLOTILLA, sizing.num_cells, 0.95)


@pytest.mark.parametrize(
    "changed", [{"rate": 0.0}, {"target": 1.5}, {"headroom": 1.0}, {"num_spare": -1}], ids=str
)
def test_values_out_of_range_are_refused(changed: dict[str, float]) -> None:
    profile = hardware.load("llama-8b-h200")
    arguments = {"rate": 1.0} | changed
    with pytest.raises(ValueError, match="rate must be above 0"):
        size(profile, systems.parse("flotilla"), Load(), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted({*hardware.names()} - {"demo-2-cores"}))
def test_values_hold_a_configuration_that_loads_and_pods_that_suffice(name: str) -> None:
    profile, load = hardware.load(name), Load(slos={"chat": SloSpec(tpot=Limit(2.0, relative=True))})
    values = yaml.safe_load(yaml.safe_dump(chart_values.values(profile, load, FLOTILLA, 5, 0.9)))
    config = FlotillaConfig.model_validate(values["config"])
    assert config.scaling.cells.min == config.scaling.cells.max == 5
    assert config.tiers["chat"].tpot_ms == pytest.approx(2e3 * profile.baseline_s(), abs=0.1)
    needed = sum(math.ceil(bundle.resources["GPU"]) for bundle in plan_cell(config).bundles)
    (group,) = values["workerGroups"]
    assert group["gpu"]["count"] == needed
    assert group["minReplicas"] == group["maxReplicas"] == 5


@pytest.mark.parametrize("name", sorted({*hardware.names()} - {"demo-2-cores"}))
def test_every_planned_drafter_has_a_gpu_or_a_share_of_one(name: str) -> None:
    values = chart_values.values(hardware.load(name), Load(), FLOTILLA, 1, 0.9)
    config = FlotillaConfig.model_validate(values["config"])
    assert all(drafter.placement.num_gpus > 0 for drafter in config.drafters)
    assert max(bundle.resources["GPU"] for bundle in plan_cell(config).bundles) <= 1


@pytest.mark.parametrize("name", ["flotilla", "adaserve", "vllm-spec-6", "specserve/priority"])
def test_what_is_installed_is_what_was_simulated(name: str) -> None:
    system = systems.parse(name)
    values = chart_values.values(hardware.load("llama-8b-h200"), Load(), system, 2, 0.9)
    config = FlotillaConfig.model_validate(yaml.safe_load(yaml.safe_dump(values["config"])))
    assert config.policy == system.config.policy
    simulated = system.config.scheduler
    for setting in ("batching", "max_running", "prefill_chunk", "micro_batches"):
        assert getattr(config.scheduler, setting) == getattr(simulated, setting), setting


def test_the_command_says_why_there_is_no_plan_and_names_an_unknown_class() -> None:
    runner = CliRunner()
    told = runner.invoke(app, ["--rate", "1", "--profile", "llama-8b-h200", "--slo", "*:tpot=0.01"])
    assert told.exit_code == 2
    assert "does not keep 95%" in told.output
    told = runner.invoke(app, ["--rate", "1", "--mix", "poems=1"])
    assert told.exit_code == 2
    assert "poems" in told.output
    told = runner.invoke(app, ["--rate", "1", "--peaks", "--burstiness", "0.5"])
    assert (told.exit_code, "not of --peaks" in told.output) == (2, True)


def test_pods_are_not_planned_for_a_machine_without_accelerators() -> None:
    told = CliRunner().invoke(app, ["--rate", "1", "--profile", "demo-2-cores"])
    assert told.exit_code == 2
    assert "accelerators" in told.output
