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
from cluster.drafter_config import EagleConfig
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
    "changed",
    [
        {"rate": 0.0},
        {"target": 1.5},
        {"headroom": 1.0},
        {"num_spare": -1},
        {"rate": math.inf},
        {"rate": math.nan},
        {"seconds": math.inf},
        {"seconds": 0.0},
        {"num_spare": 10_001},
    ],
    ids=str,
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
    groups = values["workerGroups"]
    assert all(group["minReplicas"] == group["maxReplicas"] for group in groups)
    assert groups[0]["maxReplicas"] == 5
    assert sum(group["gpu"]["count"] * group["maxReplicas"] for group in groups) == 5 * needed


@pytest.mark.parametrize("name", sorted({*hardware.names()} - {"demo-2-cores"}))
def test_every_planned_drafter_has_a_gpu_or_a_share_of_one(name: str) -> None:
    values = chart_values.values(hardware.load(name), Load(), FLOTILLA, 1, 0.9)
    config = FlotillaConfig.model_validate(values["config"])
    pooled = [drafter for drafter in config.drafters if not drafter.runs_beside_target]
    assert all(drafter.placement.num_gpus > 0 for drafter in pooled)
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


@pytest.mark.parametrize("name", sorted({*hardware.names()} - {"demo-2-cores"}))
def test_drafters_that_were_simulated_are_installed_and_no_others(name: str) -> None:
    profile = hardware.load(name)
    config = FlotillaConfig.model_validate(chart_values.values(profile, Load(), FLOTILLA, 2, 0.9)["config"])
    found = {drafter.name: drafter.kind for drafter in config.drafters}
    of_profile = dict.fromkeys(profile.drafters, "model")
    assert found == of_profile | ({"eagle": "eagle"} if profile.eagle is not None else {})


def test_eagle_runs_beside_the_target_with_as_many_layers_as_were_simulated() -> None:
    profile = hardware.load("llama-8b-h200-eagle")
    config = FlotillaConfig.model_validate(chart_values.values(profile, Load(), FLOTILLA, 2, 0.9)["config"])
    (drafter,) = config.drafters
    assert isinstance(drafter, EagleConfig)
    assert profile.eagle is not None
    assert drafter.max_depth == profile.eagle.layers
    assert config.target.heads == drafter.path == "/models/NAME-OF-YOUR-EAGLE-LAYER"


def test_drafters_with_gpus_of_their_own_are_not_in_the_targets_pods() -> None:
    """Else Ray may put a rank of the target where a drafter was to be, on another node."""
    profile = hardware.load("llama-30b-v100")
    values = chart_values.values(profile, Load(), FLOTILLA, 2, 0.9)
    cell, drafter = values["workerGroups"]
    assert (cell["gpu"]["count"], cell["maxReplicas"]) == (4, 2)
    assert (drafter["gpu"]["count"], drafter["maxReplicas"], drafter["runs"]) == (1, 2 * 5, [])
    config = FlotillaConfig.model_validate(values["config"])
    assert config.target.placement.resources.keys() == cell["rayResources"].keys() == {"verifier"}
    for planned in config.drafters:
        assert planned.placement.resources.keys() == drafter["rayResources"].keys() == {"drafter"}
    assert "&id" not in yaml.safe_dump(values), "references between parts are hard to edit"


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("llama-70b-h100", ["/models/Llama-3.1-70B", "/models/Llama-3.2-1B"]),
        (
            "llama-70b-fp8-h200-measured",
            ["/models/NAME-OF-YOUR-TARGET", "/models/NAME-OF-YOUR-DRAFTER-1b"],
        ),
    ],
)
def test_a_profile_of_a_shape_leaves_the_models_to_be_filled_in(name: str, paths: list[str]) -> None:
    config = chart_values.values(hardware.load(name), Load(), FLOTILLA, 2, 0.9)["config"]
    assert [part["path"] for part in (config["target"], *config["drafters"])] == paths


def test_a_plan_has_weights_as_small_as_those_measured() -> None:
    """As floats, 70 billion of them fill an H200 alone, and no forward takes as long as was counted with."""
    for name, expected in (("llama-70b-fp8-h200-measured", "fp8"), ("llama-8b-h200-measured", None)):
        values = chart_values.values(hardware.load(name), Load(), FLOTILLA, 2, 0.9)
        assert FlotillaConfig.model_validate(values["config"]).target.quantization == expected


def test_more_pods_than_the_chart_takes_are_refused() -> None:
    for name, most in (("llama-8b-h200", 10_000), ("llama-30b-v100", 2_000)):
        profile = hardware.load(name)
        assert chart_values.values(profile, Load(), FLOTILLA, most, 0.9)
        with pytest.raises(ValueError, match="several releases"):
            chart_values.values(profile, Load(), FLOTILLA, most + 1, 0.9)


@pytest.mark.parametrize(
    "options",
    [["--rate", "inf"], ["--rate", "1", "--seconds", "inf"], ["--rate", "1", "--burstiness", "inf"]],
)
def test_what_is_not_finite_is_refused_with_a_sentence(options: list[str]) -> None:
    told = CliRunner().invoke(app, options)
    assert (told.exit_code, "must be above 0 and finite" in told.output) == (2, True)
    assert "Traceback" not in told.output


def test_spare_cells_are_as_many_as_the_chart_takes_at_most() -> None:
    told = CliRunner().invoke(app, ["--rate", "1", "--spare", "10001"])
    assert (told.exit_code, "10000" in told.output) == (2, True)


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
