"""Configuration of retries: how long answers are kept for those that ask again."""

from __future__ import annotations

from pydantic import Field

from cluster.placement_config import StrictModel


class IdempotencyConfig(StrictModel):
    """Requests with a key of their client's are answered once, however often they are sent."""

    enabled: bool = Field(
        default=True, description="Off treats every request as a new one, whatever key it has."
    )
    x_request_id: bool = Field(
        default=False,
        description="Whether `X-Request-Id` is a key as well. Proxies set it on every request, and clients "
        "use one for several: leave it off unless neither is the case.",
    )
    grace_s: float = Field(
        default=30.0,
        ge=0,
        description="An answer that nobody reads any longer goes on being generated for so long.",
    )
    ttl_s: float = Field(default=600.0, gt=0, description="A complete answer is kept for so long.")
    max_answers: int = Field(
        default=1024, ge=1, description="Answers kept in one front end, those being generated included."
    )
    max_bytes: int = Field(
        default=64 << 20, ge=1 << 16, description="Bytes of answers kept in one front end."
    )
