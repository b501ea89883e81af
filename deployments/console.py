"""`/console`: a page that shows an answer with the token trees it came from, and how the cells are."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cluster.members import Member
from cluster.metric_set import flotilla_version
from deployments.api_service import ApiService
from deployments.authentication import Grant
from deployments.key_gate import grant_of
from deployments.sampling_mapping import CellInfo
from deployments.tiers_api import tier_list

PAGE = Path(__file__).with_name("console_page")
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}

#: Nothing from elsewhere, no inline script or style, in nobody's frame.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

#: However many pages look, the members are asked no more often than this. Seconds.
_KEPT_S = 0.8
#: Control calls answer within this, or the state does without.
_CALL_TIMEOUT_S = 2.0

#: Gauges and counters of a kind of drafter, and how the state calls them.
_OF_DRAFTERS = {
    "flotilla_drafters_ready": "ready",
    "flotilla_drafter_capacity": "capacity",
    "flotilla_drafter_requests": "requests",
    "flotilla_drafter_capacity_price": "price",
}
_OUTCOMES = ("drafted", "verified", "accepted")
_TOTALS = {
    "flotilla_requests_total": "requests",
    "flotilla_front_end_requests_rejected_total": "rejected",
    "flotilla_generation_tokens_total": "output_tokens",
    "flotilla_preemptions_total": "preemptions",
    "flotilla_worker_restarts_total": "restarts",
}
_WANTED = (*_OF_DRAFTERS, *_TOTALS, "flotilla_drafter_tokens_total", "flotilla_slo_requests_total")

Instances = list[dict[str, Any]]


class ConsoleState:
    """What the page shows of the system.

    Args:
        service: the API, which knows the model and the tiers.
        exposition: the metrics of all members; those of the service's cell if None.
        members: cells and front ends, as last heard of.
        drafters: drafter instances, of the only cell; None if they cannot be asked for.
        clock: seconds.
    """

    def __init__(
        self,
        service: ApiService,
        exposition: Callable[[], Awaitable[str]] | None = None,
        members: Callable[[], Sequence[Member]] = tuple,
        drafters: Callable[[], Awaitable[Instances]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._exposition = exposition or service.prometheus
        self._members = members
        self._drafters = drafters
        self._clock = clock
        self._kept_since = -math.inf
        self._kept: dict[str, Any] = {}
        # By the tiers and models that a key may ask for.
        self._encoded: dict[tuple[tuple[str, ...] | None, tuple[str, ...]], bytes] = {}
        self._lock = asyncio.Lock()

    async def json(self, grant: Grant | None = None) -> bytes:
        """The state as JSON, at most `_KEPT_S` old; raises 503 while the cell does not answer.

        Of tiers and models it tells those that the request's key may ask for.
        """
        info = await self._service.info()
        async with self._lock:
            if self._clock() - self._kept_since >= _KEPT_S:
                asked_at = self._clock()
                self._kept = await self._ask(info)
                self._kept_since = asked_at
                self._encoded.clear()
            tiers = None if grant is None else grant.tiers
            models = (info if grant is None else grant.seen(info)).models
            if (tiers, models) not in self._encoded:
                told = self._kept | {"models": models, "tiers": tier_list(self._service.tiers, tiers)}
                self._encoded[tiers, models] = msgspec.json.encode(told)
            return self._encoded[tiers, models]

    async def _ask(self, info: CellInfo) -> dict[str, Any]:
        members = list(self._members())
        cells = [member for member in members if member.kind == "cell"]
        text, instances = await asyncio.gather(self._exposition(), self._instances(len(cells)))
        return {
            "model": info.model,
            "policy": info.policy,
            "version": flotilla_version(),
            "max_model_len": info.max_tokens,
            # Kinds, as tokens are told of; names with a `/` are instances of theirs.
            "drafters": [name for name in info.drafters if "/" not in name],
            "cells": [_cell(member) for member in cells],
            "front_ends": [
                {"id": member.id, "state": member.state, "streams": member.stats.get("streams", 0.0)}
                for member in members
                if member.kind == "front_end"
            ],
            "instances": instances,
            **counted(text),
        }

    async def _instances(self, num_cells: int) -> Instances:
        if self._drafters is None or num_cells > 1:  # whose they would be is up to Ray Serve
            return []
        with contextlib.suppress(Exception):  # a remote call: anything may come out of it
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                return [
                    {name: one[name] for name in ("name", "kind", "state", "load", "restarts", "waits_for")}
                    for one in await self._drafters()
                ]
        return []


def _cell(member: Member) -> dict[str, Any]:
    return {"id": member.id, "state": member.state, "stage": member.details.get("stage", ""), **member.stats}


def counted(text: str) -> dict[str, Any]:
    """Of an exposition: totals, drafters by cell and kind, and attainment by tier."""
    wanted = (line for line in text.split("\n") if line.removeprefix("# TYPE ").startswith(_WANTED))
    totals = dict.fromkeys(_TOTALS.values(), 0.0)
    drafters: dict[tuple[str, str], dict[str, float]] = {}
    tiers: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families("\n".join([*wanted, ""])):
        for sample in family.samples:
            name, labels, value = sample.name, sample.labels, sample.value
            if name in _TOTALS:
                totals[_TOTALS[name]] += value
            elif name in _OF_DRAFTERS:
                of = drafters.setdefault((labels.get("cell", ""), labels["drafter"]), {})
                of[_OF_DRAFTERS[name]] = of.get(_OF_DRAFTERS[name], 0.0) + value
            elif name == "flotilla_drafter_tokens_total":
                of = drafters.setdefault((labels.get("cell", ""), labels["drafter"]), {})
                of[labels["outcome"]] = value
            elif name == "flotilla_slo_requests_total" and labels["objective"] == "all":
                tier = tiers.setdefault(labels["tier"], {"attained": 0.0, "missed": 0.0})
                tier["attained" if labels["attained"] == "true" else "missed"] += value
    fields = (*_OF_DRAFTERS.values(), *_OUTCOMES)
    return {
        "totals": totals,
        "pool": [
            {"cell": cell, "kind": kind, **{name: of.get(name, 0.0) for name in fields}}
            for (cell, kind), of in sorted(drafters.items())
        ],
        "attainment": [{"tier": tier, **counts} for tier, counts in sorted(tiers.items())],
    }


def add_console_routes(app: FastAPI, state: ConsoleState) -> None:
    """Add the page, its files and its state."""
    files = {
        path.name: (path.read_bytes(), _TYPES[path.suffix])
        for path in sorted(PAGE.iterdir())
        if path.suffix in _TYPES
    }
    tags = {name: f'"{hashlib.sha256(content).hexdigest()[:16]}"' for name, (content, _) in files.items()}

    def served(request: Request, name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        headers = HEADERS | {"ETag": tags[name]}
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers=headers)
        content, media_type = files[name]
        return Response(content, media_type=f"{media_type}; charset=utf-8", headers=headers)

    @app.get("/console", include_in_schema=False)
    async def console(request: Request) -> Response:
        """The page."""
        return served(request, "index.html")

    @app.get("/console/", include_in_schema=False)
    async def console_directory() -> Response:
        """Sent to the page, relative: a proxy may serve it under a prefix."""
        return Response(status_code=308, headers=HEADERS | {"Location": "../console"})

    @app.get("/console/state")
    async def console_state(request: Request) -> Response:
        """What the console shows of cells, drafters and objectives."""
        headers = {"Cache-Control": "no-store"}
        body = await state.json(grant_of(request.scope))
        return Response(body, media_type="application/json", headers=headers)

    @app.get("/console/{name}", include_in_schema=False)
    async def console_file(request: Request, name: str) -> Response:
        """A file of the page."""
        return served(request, name)
