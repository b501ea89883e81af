"""Configuration of how many cells, front ends and drafters there are, and what changes their number."""

from __future__ import annotations

from pydantic import Field, model_validator

from cluster.placement_config import ReplicaPlacementConfig, StrictModel


class CellScalingConfig(StrictModel):
    """How many cells serve. With `max` equal to `min`, the default, their number is fixed."""

    min: int = Field(default=1, ge=1, description="Cells at the start, and at least.")
    max: int = Field(default=1, ge=1, description="Cells at most; each loads the target and its drafters.")
    target_attainment: float = Field(
        default=0.95,
        gt=0,
        le=1,
        description="A cell is added while a smaller share of requests with objectives is predicted to meet "
        "them.",
    )
    target_queue_ms: float = Field(
        default=500.0,
        gt=0,
        description="A cell is added while a request that comes is predicted to wait longer, over all cells.",
    )
    kv_high: float = Field(
        default=0.85, gt=0, le=1, description="A cell is added while more of the cells' KV slots is in use."
    )
    low_load: float = Field(
        default=0.6,
        gt=0,
        lt=1,
        description="A cell is removed only if those that stay are predicted to be below this share of every "
        "limit: between it and the limits nothing changes.",
    )
    for_background: bool = Field(
        default=False,
        description="Whether requests in the background count as load, as all others do. Else no cell is "
        "added or kept for them, as they have what time others leave.",
    )
    upscale_delay_s: float = Field(
        default=5.0, ge=0, description="How long there must be too few cells before one is added."
    )
    downscale_delay_s: float = Field(
        default=60.0, ge=0, description="How long there must be too many before one is removed."
    )
    max_step: int = Field(default=1, ge=1, description="Cells added at once, at most.")
    max_step_down: int = Field(default=1, ge=1, description="Cells removed at once, at most.")
    drain_timeout_s: float = Field(
        default=10.0,
        gt=0,
        description="How long a cell that is removed goes on with what it runs; then other cells take over.",
    )
    placement: ReplicaPlacementConfig = Field(
        default=ReplicaPlacementConfig(),
        description="Where the cell's own process runs, the scheduler; its workers have their own.",
    )
    await_ready: bool = Field(
        default=False,
        description="The first cell counts as started only once it serves, too: on Kubernetes, where traffic "
        "moves to a new cluster as soon as Ray Serve calls its application running.",
    )

    @model_validator(mode="after")
    def _in_order(self) -> CellScalingConfig:
        if self.max < self.min:
            raise ValueError(f"scaling.cells.max {self.max} is below scaling.cells.min {self.min}")
        return self

    @property
    def is_fixed(self) -> bool:
        """Whether their number never changes."""
        return self.max == self.min


class FrontEndScalingConfig(StrictModel):
    """How many front ends serve beyond `http.front_ends`, which there are at least."""

    max: int | None = Field(
        default=None, ge=1, description="Front ends at most; `http.front_ends` of them if unset."
    )
    streams_per_replica: float = Field(
        default=64.0, gt=0, description="Open streams that one front end is to have."
    )
    upscale_delay_s: float = Field(default=5.0, ge=0, description="As of cells.")
    downscale_delay_s: float = Field(default=60.0, ge=0, description="As of cells.")
    drain_timeout_s: float = Field(
        default=300.0,
        gt=0,
        description="How long a front end that is removed goes on with its open streams while cells serve, "
        "at most. Where all cells are removed too, `cells.drain_timeout_s` is its time.",
    )
    placement: ReplicaPlacementConfig = Field(
        default=ReplicaPlacementConfig(),
        description="Where a front end runs. The directory of the system runs there, too.",
    )


class DrafterScalingConfig(StrictModel):
    """How many instances of each kind of drafter a cell has beyond its `replicas`, which it has at least."""

    enabled: bool = Field(default=False, description="Change their number by capacity prices.")
    max_replicas: int = Field(default=4, ge=1, description="Instances of a kind at most.")
    price_high: float = Field(
        default=20.0,
        gt=0,
        description="Tokens per second that one more place on the kind must be worth for an instance to be "
        "added.",
    )
    sustained_s: float = Field(
        default=5.0, ge=0, description="How long the price must have been that high at every look."
    )
    idle_s: float = Field(
        default=60.0,
        ge=0,
        description="How long the price must have been zero, and the places of one instance free, before it "
        "is drained.",
    )
    cooldown_s: float = Field(
        default=20.0, ge=0, description="Least time between two changes of the instances of a kind."
    )


class ScalingConfig(StrictModel):
    """What grows and shrinks with the load (docs/scaling.md). By default nothing does."""

    cells: CellScalingConfig = Field(default=CellScalingConfig(), description="Cells.")
    front_ends: FrontEndScalingConfig = Field(default=FrontEndScalingConfig(), description="Front ends.")
    drafters: DrafterScalingConfig = Field(
        default=DrafterScalingConfig(), description="Drafters within a cell."
    )
