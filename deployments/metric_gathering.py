"""The metrics of all members of the system as one exposition, and where each of them is by itself."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import uvicorn
from fastapi import FastAPI
from starlette.responses import PlainTextResponse, Response

from cluster.http_config import HttpConfig
from cluster.members import Member
from cluster.metric_set import MetricSet, merge
from deployments.front_end_metrics import FrontEndMetrics
from deployments.http_limits import server_config
from deployments.listening import shared_listener

_log = logging.getLogger(__name__)

#: Of the exposition (https://prometheus.io/docs/instrumenting/exposition_formats/).
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# A scrape must be over before Prometheus gives up on it, after 10 s by default.
_FETCH_TIMEOUT_S = 3.0


class Gatherer:
    """Collects what the members expose.

    Args:
        own: of the front end that answers.
        members: all, as last heard of.
    """

    def __init__(self, own: FrontEndMetrics, members: Callable[[], Sequence[Member]]) -> None:
        self._own = own
        self._members = members

    async def exposition(self) -> str:
        """Every member once, in the text format; a gauge says who did not answer and is left out."""
        members = list(self._members())
        others = [one for one in members if one.id != self._own.front_end and one.metrics_url]
        timeout = aiohttp.ClientTimeout(total=_FETCH_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            texts = await asyncio.gather(*(_fetch(session, one.metrics_url) for one in others))
        scraped = {one.id: text is not None for one, text in zip(others, texts, strict=True)}
        scraped[self._own.front_end] = True
        about = _about(members, scraped)
        return merge([about, self._own.render(), *(text for text in texts if text is not None)])

    def targets(self) -> list[dict[str, Any]]:
        """Every member by itself, as Prometheus' HTTP service discovery (`http_sd_configs`) reads it."""
        return [
            {
                "targets": [urlsplit(member.metrics_url).netloc],
                "labels": {
                    "__meta_flotilla_kind": member.kind,
                    "__meta_flotilla_id": member.id,
                    "__meta_flotilla_node": member.node,
                },
            }
            for member in self._members()
            if member.metrics_url
        ]


def add_metric_routes(
    app: FastAPI, gatherer: Gatherer | None, of_cell: Callable[[], Awaitable[str]] | None = None
) -> None:
    """Add `/metrics` and `/metrics/targets`; without a gatherer, the metrics of the only cell."""

    @app.get("/metrics")
    async def metrics() -> Response:
        """Metrics of the whole system for Prometheus."""
        text = ""
        if gatherer is not None:
            text = await gatherer.exposition()
        elif of_cell is not None:
            text = await of_cell()
        return PlainTextResponse(text, media_type=CONTENT_TYPE)

    if gatherer is not None:

        @app.get("/metrics/targets")
        async def targets() -> list[dict[str, Any]]:
            """Where every process is scraped by itself, for Prometheus' HTTP service discovery."""
            return gatherer.targets()


def serve_metrics(gatherer: Gatherer, host: str, port: int) -> None:
    """Serve the metric routes, and nothing else, from a thread; front ends of one node share the port."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    add_metric_routes(app, gatherer)
    server = uvicorn.Server(metrics_config(app))
    listener = shared_listener(host, port)
    threading.Thread(target=server.run, args=([listener],), name="metrics", daemon=True).start()


def metrics_config(app: FastAPI) -> uvicorn.Config:
    """uvicorn as it serves metrics: within the limits of any front end, as whoever connects needs no key."""
    return server_config(app, HttpConfig())


async def _fetch(session: aiohttp.ClientSession, url: str) -> str | None:
    try:
        async with session.get(url) as answer:
            answer.raise_for_status()
            return await answer.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        _log.warning("no metrics from %s: %r", url, error)
        return None


def _about(members: Sequence[Member], scraped: dict[str, bool]) -> str:
    about = MetricSet("gathered")
    for member in members:
        about.gauge("flotilla_members", member.kind, member.state).inc()
        about.gauge("flotilla_member_scraped", member.kind, member.id).set(scraped.get(member.id, False))
        for signal, value in member.stats.items():
            about.gauge("flotilla_scaling_signal", member.kind, member.id, signal).set(value)
    return about.render()
