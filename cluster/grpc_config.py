"""Configuration of the gRPC service."""

from __future__ import annotations

from pydantic import Field, model_validator

from cluster.placement_config import StrictModel

_EVERYWHERE = ("0.0.0.0", "::")


class GrpcConfig(StrictModel):
    """Whether and where the API is also served over gRPC (docs/grpc.md)."""

    enabled: bool = Field(default=False, description="Off unless told otherwise.")
    host: str = Field(default="127.0.0.1", min_length=1, description="Loopback unless told otherwise.")
    port: int = Field(default=9000, ge=0, le=65535, description="0 takes any free port.")
    direct: bool = Field(
        default=True,
        description="Front ends listen on the port themselves; off puts Ray Serve's gRPC proxy in between, "
        "which listens on every address.",
    )
    max_message_bytes: int = Field(
        default=4 << 20, ge=1024, description="Larger messages are refused (only while front ends listen)."
    )
    default_deadline_s: float | None = Field(
        default=600.0,
        gt=0,
        description="Requests without a deadline of their own end after so long; never if null. Ray Serve's "
        "proxy applies it to every request.",
    )
    read_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="A client must have sent the message of its call after so long (only while front ends "
        "listen).",
    )
    write_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="The request of a client that leaves 64 KiB of its answer unread for so long ends (only "
        "while front ends listen).",
    )
    keepalive_s: float = Field(
        default=20.0,
        ge=1,
        description="A client silent for so long is pinged, and its requests end if it does not answer "
        "within as long again (only while front ends listen).",
    )

    @model_validator(mode="after")
    def _says_where_it_listens(self) -> GrpcConfig:
        if self.enabled and not self.direct and self.host not in _EVERYWHERE:
            raise ValueError(
                f"Ray Serve's gRPC proxy listens on every address, and cannot be kept to {self.host}: "
                'set `grpc.host: "::"` if that is meant, or `grpc.direct: true`'
            )
        return self
