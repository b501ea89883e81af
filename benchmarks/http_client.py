"""What the benchmarks' HTTP clients have in common: a session of their own, and lines of event streams."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from deployments.connection_errors import reason
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
        """Entries of `/v1/models`, each with an `id`.

        Raises:
            RuntimeError: if the server cannot be reached, or lists none.
        """
        try:
            async with self.session.get(f"{self.url}/v1/models") as response:
                raw = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise RuntimeError(f"cannot reach {self.url}: {reason(error)}") from None
        try:
            entries: list[dict[str, Any]] = msgspec.json.decode(raw)["data"]
            if response.status == 200 and entries and all(entry["id"] for entry in entries):
                return entries
        except (msgspec.DecodeError, KeyError, TypeError):
            pass
        raise RuntimeError(
            f"{self.url}/v1/models lists no models; it answers {response.status}: {error_text(raw)}"
        )


def error_text(body: bytes) -> str:
    """What an error's body says, in short."""
    try:
        detail = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode(errors="replace").strip()[:300]
    error = detail.get("error", detail) if isinstance(detail, dict) else detail
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]


def event_data(line: bytes) -> bytes | None:
    """What a line of a stream of server-sent events carries; None if it carries no data."""
    return line[5:].strip() if line.startswith(b"data:") else None
