"""What the benchmarks' HTTP clients have in common: a session of their own, and lines of event streams."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp

from deployments.server_url import server_root


class HttpClient:
    """Asks one server over as many connections as it takes; use as an async context manager.

    Args:
        url: base address, with or without `/v1`.
        timeout: of every request.
        headers: of every request.
        keepalive_s: how long an idle connection is kept for the next request.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: aiohttp.ClientTimeout,
        headers: Mapping[str, str] | None = None,
        keepalive_s: float = 15.0,
    ) -> None:
        self.url = server_root(url)
        self._timeout = timeout
        self._headers = dict(headers or {})
        self._keepalive_s = keepalive_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # aiohttp's own context has read which authorities are trusted (SSL_CERT_FILE) when it was imported.
        trusted = ssl.create_default_context() if self.url.startswith("https:") else True
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keepalive_s, ssl=trusted),
            headers=self._headers,
            timeout=self._timeout,
            read_bufsize=1 << 18,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """The open HTTP session.

        Raises:
            RuntimeError: outside the context manager.
        """
        if self._session is None:
            raise RuntimeError(f"use the client as `async with {type(self).__name__}(...) as client`")
        return self._session

    async def models(self) -> list[dict[str, Any]]:
        """Entries of `/v1/models`."""
        async with self.session.get(f"{self.url}/v1/models") as response:
            response.raise_for_status()
            entries: list[dict[str, Any]] = (await response.json())["data"]
            return entries


def event_data(line: bytes) -> bytes | None:
    """What a line of a stream of server-sent events carries; None if it carries no data."""
    return line[5:].strip() if line.startswith(b"data:") else None
