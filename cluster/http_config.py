"""Configuration of the HTTP API: where it listens, TLS, and what clients may take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from cluster.placement_config import StrictModel


class HttpConfig(StrictModel):
    """Where the API listens."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Loopback unless told otherwise.")
    port: int = Field(default=8000, ge=0, le=65535, description="0 takes any free port.")
    direct: bool = Field(
        default=True,
        description="Front ends listen on the port themselves; off puts Ray Serve's HTTP proxy in between.",
    )
    front_ends: int = Field(default=1, ge=1, description="Front-end replicas.")
    max_body_bytes: int = Field(
        default=4 << 20, ge=1024, description="Larger bodies get a 413; a token of text is some four bytes."
    )
    unknown_fields: Literal["refuse", "ignore"] = Field(
        default="refuse",
        description="A field of a request that does not exist here gets a 400 that names it; or it is left "
        "out, as vLLM does, and the response names it in `X-Ignored-Fields`.",
    )
    allowed_origins: tuple[str, ...] = Field(
        default=(),
        description="Origins such as `https://chat.example` whose pages browsers let ask for text (CORS), "
        "also where the server is within and the page outside; `*` for any, but not that.",
    )
    admin: bool = Field(
        default=False,
        description="`/admin` changes the pool of drafters; it answers to clients on the same machine, and "
        "to API keys that permit it.",
    )
    max_open_requests: int = Field(
        default=1024,
        ge=1,
        description="Requests for text open at once in one front end, streams and gRPC included; more get a "
        "429.",
    )
    request_timeout_s: float | None = Field(
        default=600.0, gt=0, description="Requests end after so long; never if null."
    )
    read_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="A client must have sent its headers after so long, and its body after as long again.",
    )
    write_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="A client that leaves 64 KiB of its answer unread for so long is hung up on (only while "
        "front ends listen, as the one for headers).",
    )
    tls_certificate: Path | None = Field(
        default=None,
        description="PEM file with the certificate and those between it and the root; HTTPS, and gRPC over "
        "TLS, if set.",
    )
    tls_key: Path | None = Field(default=None, description="PEM file with its private key.")
    tls_client_ca: Path | None = Field(
        default=None,
        description="PEM file with authorities: if set, only clients with a certificate that one of them "
        "signed connect, over HTTPS and gRPC (mutual TLS).",
    )

    @field_validator("tls_certificate", "tls_key", "tls_client_ca")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        # Ray's workers have another working directory than who wrote the configuration.
        return None if path is None else path.absolute()

    @field_validator("allowed_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s?#]+", origin):
                raise ValueError(
                    f"{origin!r} is no origin: write a scheme, a host and perhaps a port, no path"
                )
        return origins

    @model_validator(mode="after")
    def _has_both(self) -> HttpConfig:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key come together: set both, or neither")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError(
                "tls_client_ca asks clients for certificates: set tls_certificate and tls_key too"
            )
        if self.tls_client_ca is not None and not self.direct:
            raise ValueError(
                "Ray Serve's proxy does not ask clients for certificates, and tls_client_ca does: set "
                "direct: true, or have a proxy in front ask for them"
            )
        return self

    @property
    def scheme(self) -> str:
        """Of the API's URL."""
        return "http" if self.tls_certificate is None else "https"
