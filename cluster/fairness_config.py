"""Configuration of what API keys get of a cell that cannot serve them all at once."""

from __future__ import annotations

from pydantic import Field

from cluster.placement_config import StrictModel


class FairnessConfig(StrictModel):
    """How waiting requests of several API keys share a cell; without keys, or with one, nothing changes."""

    enabled: bool = Field(
        default=True,
        description="Whether places go to the key that has had the least, by weight; else keys are not told "
        "apart, and the batching rule alone decides.",
    )
    output_cost: float = Field(
        default=2.0,
        gt=0,
        le=1000,
        description="What an output token counts for; a prompt token that is computed counts for one.",
    )
    queue_threshold: float = Field(
        default=1.0,
        gt=0,
        le=1000,
        description="A key may have so many requests waiting per place that is still free in the queue. "
        "With 1, one key alone fills at most half of it, so that others find room.",
    )
