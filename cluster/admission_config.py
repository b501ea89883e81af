"""Configuration of admission: how sure it is, and how far it looks ahead."""

from __future__ import annotations

from pydantic import Field

from cluster.placement_config import StrictModel


class AdmissionConfig(StrictModel):
    """Whether a request that may be refused or downgraded is taken; see docs/objectives.md."""

    tolerance: float = Field(
        default=0.1,
        ge=0,
        le=10,
        description="Share by which a prediction may exceed an objective that still counts as met.",
    )
    max_retry_after_s: float = Field(
        default=3600.0, ge=1, le=3600, description="Longest time after which a client is told to come back."
    )
