"""The Ray Serve deployment that answers HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.config import FlotillaConfig
from cluster.model_paths import model_directory
from deployments.api_service import ApiService
from deployments.cell_client import Endpoint
from deployments.openai_api import create_app
from deployments.text_codec import TextCodec


class CellHandle:
    """The cell's control calls through Ray Serve; the tokens travel by `CellClient` instead."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def endpoint(self) -> Endpoint:
        """See `CellControl`."""
        host, port, token = await self._handle.endpoint.remote()
        return host, port, token

    async def describe(self) -> Mapping[str, Any]:
        """See `CellControl`."""
        description: Mapping[str, Any] = await self._handle.describe.remote()
        return description

    async def metrics(self) -> str:
        """See `CellControl`."""
        text: str = await self._handle.metrics.remote()
        return text


@serve.ingress()
class FrontEnd:
    """One replica: tokenizer, API, and a connection to the cell."""

    def __init__(self, config: dict[str, Any], cell: DeploymentHandle) -> None:
        self._config = FlotillaConfig.model_validate(config)
        self._service = ApiService(
            CellHandle(cell),
            TextCodec.load(model_directory(self._config.target.path)),
            tiers=self._config.tiers,
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray Serve after the constructor."""
        return create_app(
            self._service,
            max_body_bytes=self._config.http.max_body_bytes,
            # Serve's proxy sends the header itself, with the id it also passes in.
            sends_request_id=False,
        )
