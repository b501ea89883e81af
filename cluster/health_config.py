"""Configuration of how processes are watched: signs of life, and how long an answer may take."""

from __future__ import annotations

from pydantic import Field, model_validator

from cluster.placement_config import StrictModel


class HealthConfig(StrictModel):
    """When a process that does not answer is given up and replaced (docs/reliability.md)."""

    heartbeat_s: float = Field(
        default=0.5, gt=0, le=60, description="Workers and cells send a sign of life this often."
    )
    silent_s: float = Field(
        default=5.0,
        gt=0,
        description="A worker that has given no sign of life for so long is killed and made again; a front "
        "end leaves a cell that gives none.",
    )
    loading_silent_s: float = Field(
        default=120.0,
        gt=0,
        description="The same for a worker that loads its model or is measured: importing libraries from a "
        "slow disk holds up its signs of life.",
    )
    target_stuck_s: float = Field(
        default=10.0,
        gt=0,
        description="A target that lives, and has owed an answer for so long and for `stuck_factor` times "
        "the predicted time, is killed and made again. For drafters `pool.hang_timeouts` says how long.",
    )
    stuck_factor: float = Field(
        default=20.0, ge=1, description="No call counts as stuck before so many times its predicted time."
    )
    first_call_s: float = Field(
        default=120.0,
        gt=0,
        description="The first call of a new worker may take so long: kernels are compiled in it.",
    )
    scheduler_stuck_s: float = Field(
        default=30.0,
        gt=0,
        description="A cell whose requests wait for nobody's answer for so long is unhealthy, and replaced.",
    )
    orphan_s: float = Field(
        default=60.0,
        gt=0,
        description="Workers whose cell died wait so long for another one to take them over, models loaded; "
        "then they end.",
    )
    member_silent_s: float | None = Field(
        default=15.0,
        gt=0,
        description="A cell or front end that served and has not reported to the directory for so long is "
        "killed, so that Ray Serve replaces it; null leaves that to Ray Serve's own checks, which take "
        "longer.",
    )
    cell_wait_s: float = Field(
        default=120.0,
        gt=0,
        description="Requests wait so long for a cell while there is none, then they end with 503. An only "
        "cell that is lost must load its model within it; where its machine was cut off, Ray takes a minute "
        "more.",
    )

    @model_validator(mode="after")
    def _allows_lost_beats(self) -> HealthConfig:
        if self.silent_s < 4 * self.heartbeat_s:
            raise ValueError(
                f"health.silent_s {self.silent_s:g} is less than four times heartbeat_s "
                f"{self.heartbeat_s:g}: a sign of life that is a little late would be taken for a death"
            )
        return self
