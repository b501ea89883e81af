"""Configuration of a cell's workers: how they are placed and watched."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cluster.placement_config import StrictModel


class PoolConfig(StrictModel):
    """How the cell's workers are placed and watched."""

    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        default="PACK", description="How Ray lays out what the target's ranks and the drafters reserve."
    )
    hang_timeouts: int = Field(
        default=3,
        ge=1,
        description="A drafter that has been silent for so many times `scheduler.draft_timeout_ms` while an "
        "answer is owed is killed and replaced.",
    )
    standby: int = Field(
        default=1,
        ge=0,
        le=8,
        description="Processes kept in reserve that have imported torch and hold no model, to replace a lost "
        "model drafter with; about 300 MB each. 0 is none.",
    )
    core_affinity: bool = Field(
        default=True,
        description="On a machine with fewer cores than the cell has processes, the target's ranks and the "
        "scheduler keep to cores of their own, and drafters to the others. Off where other programs keep to "
        "cores, too.",
    )
