"""What happens to a fleet: cells, arrivals over time, losses, and who routes and scales."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import yaml
from pydantic import ConfigDict, Field, PositiveFloat, ValidationError, model_validator

from cluster.config_errors import wrong_fields
from cluster.placement_config import StrictModel
from cluster.scaling_config import CellScalingConfig

SCENARIOS = Path(__file__).with_name("scenarios")

RouterName = Literal["flotilla", "round-robin", "two-choices"]
ScalingName = Literal["flotilla", "ongoing", "fixed"]


class _Finite(StrictModel):
    """All of it can be simulated: no number is infinite, as YAML's `.inf` is, or none."""

    model_config = ConfigDict(allow_inf_nan=False)


class Burst(_Finite):
    """A time in which more requests come."""

    start_s: float = Field(ge=0, description="When it begins.")
    seconds: float = Field(gt=0, description="How long it lasts.")
    factor: float = Field(gt=0, description="By what the rate is multiplied.")


class ArrivalConfig(_Finite):
    """How often requests come."""

    rate: float = Field(
        gt=0, description="Requests per second, mean over a whole wave or trace, without bursts."
    )
    seconds: float = Field(gt=0, description="Of arrivals.")
    swing: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Depth of the daily wave: between 1 - swing and 1 + swing.",
    )
    period_s: float | None = Field(
        default=None, gt=0, description="Length of the wave, which begins at its low; the run's if unset."
    )
    bursts: tuple[Burst, ...] = Field(default=(), description="On top of the wave.")
    unrest: float = Field(
        default=0.0, ge=0, description="Coefficient of variation of the rate from second to second (gamma)."
    )
    trace: Path | None = Field(
        default=None,
        description="Azure (.csv) or Mooncake (.jsonl) trace whose arrivals per `trace_bin_s`, stretched to "
        "the run and to its mean rate, replace the wave.",
    )
    trace_bin_s: float = Field(default=30.0, gt=0, description="Of the trace's own time.")
    mix: dict[str, float] | None = Field(default=None, description="Shares of the built-in classes.")
    ttft_ms: dict[str, PositiveFloat] = Field(
        default={"code": 1000.0, "chat": 1000.0, "summary": 2000.0},
        description="Objectives for the first token by class; those for the time per token are AdaServe's.",
    )


class Scenario(_Finite):
    """A fleet and what is asked of it; times in seconds of simulated time."""

    name: str = Field(description="Of the report.")
    profile: str = Field(default="llama-70b-a100", description="Models and hardware of a cell.")
    system: str = Field(
        default="flotilla", description="Policy and batching rule, as of `flotilla simulate`."
    )
    max_running: int = Field(default=64, ge=1, description="Requests a cell decodes at once.")
    max_waiting: int = Field(default=256, ge=1, description="Requests in a cell's queue before it refuses.")
    gpus_per_cell: int = Field(default=4, ge=1, description="For GPU hours.")
    arrivals: ArrivalConfig = Field(description="Requests.")
    cells: CellScalingConfig = Field(description="Limits and delays, as in a configuration file.")
    initial: int | None = Field(
        default=None, ge=1, description="Cells that serve at the start; `min` if unset."
    )
    start_up_s: float = Field(
        default=120.0, ge=0, description="From asking for a cell until it serves: a machine, and its models."
    )
    start_up_spread: float = Field(
        default=0.0, ge=0, description="Standard deviation of the logarithm of that time."
    )
    mean_hours_between_losses: float | None = Field(
        default=None, gt=0, description="Of one cell; unset, none is lost."
    )
    front_ends: int = Field(default=2, ge=1, description="That route, each knowing its own requests only.")
    router: RouterName = Field(default="flotilla", description="Who chooses cells.")
    scaling: ScalingName = Field(default="flotilla", description="Who says how many there are.")
    target_ongoing: float = Field(
        default=32.0, gt=0, description="Requests per cell that `ongoing` aims at (Ray Serve's rule)."
    )
    ongoing_delays_s: tuple[float, float] = Field(
        default=(30.0, 600.0),
        description="Of that rule before it adds and before it removes; Serve's defaults.",
    )
    report_s: float = Field(default=0.25, gt=0, description="Seconds between reports of a cell.")
    look_s: float = Field(default=1.0, gt=0, description="Seconds between two looks of the scaling rule.")
    seed: int = Field(default=0, ge=0, description="Of everything that is drawn.")

    @model_validator(mode="after")
    def _in_order(self) -> Scenario:
        if not self.cells.min <= self.num_initial <= self.cells.max:
            raise ValueError(f"initial {self.num_initial} is not within cells.min and cells.max")
        return self

    @property
    def num_initial(self) -> int:
        """Cells that serve at the start."""
        return self.cells.min if self.initial is None else self.initial


def names() -> list[str]:
    """The scenarios there are."""
    return sorted(path.stem for path in SCENARIOS.glob("*.yaml"))


def load(name: str) -> Scenario:
    """A scenario by its name, or from a YAML or JSON file.

    Raises:
        ValueError: for a name or a file that is none, saying what is wrong with it.
    """
    path = SCENARIOS / f"{name}.yaml" if name in names() else Path(name)
    try:
        return Scenario.model_validate(yaml.safe_load(path.read_text()))
    except FileNotFoundError:
        known = ", ".join(names())
        raise ValueError(f"no scenario {name!r}: there is no such file, and the names are: {known}") from None
    except OSError as error:
        raise ValueError(f"cannot read the scenario {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no scenario: it is not UTF-8") from None
    except ValidationError as error:
        lines = wrong_fields(error, model=Scenario)
        raise ValueError(f"{path} is no scenario: {'; '.join(lines)}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no scenario: {error}") from None
