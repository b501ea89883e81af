"""`GET /debug/decisions`, `/debug/timeline` and `/debug/workers`: what was done, and how workers are."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from deployments.errors import ApiError, bad_request

#: Steps in an answer that names no limit.
DEFAULT_LIMIT = 20
MOST_STEPS = 100_000

_PARAMETERS = [
    {
        "name": "limit",
        "in": "query",
        "description": "Newest steps to return.",
        "schema": {"type": "integer", "minimum": 1, "maximum": MOST_STEPS, "default": DEFAULT_LIMIT},
    },
    {
        "name": "format",
        "in": "query",
        "description": "`jsonl` is what `flotilla replay` reads.",
        "schema": {"type": "string", "enum": ["json", "jsonl"], "default": "json"},
    },
]

#: The newest steps as JSON lines, None while none are kept; raises `ApiError` if the cell does not answer.
Decisions = Callable[[int], Awaitable[bytes | None]]
#: A trace in JSON, None while it is not kept; raises as above.
Timeline = Callable[[], Awaitable[bytes | None]]
#: How every worker is, by process; raises as above.
Workers = Callable[[], Awaitable[list[dict[str, Any]]]]


def add_debug_routes(app: FastAPI, decisions: Decisions, timeline: Timeline, workers: Workers) -> None:
    """Add the routes; those of records answer 404, and say how to change that, while nothing is recorded."""

    @app.get("/debug/workers")
    async def debug_workers() -> Response:
        """How every worker is: ready, busy, stalled, starting, lost, draining; since when, and with what."""
        return Response(
            json.dumps({"object": "list", "data": await workers()}), media_type="application/json"
        )

    @app.get("/debug/decisions", openapi_extra={"parameters": _PARAMETERS})
    async def debug_decisions(request: Request) -> Response:
        """Decisions of the newest steps: `limit` of them, as JSON or, with `format=jsonl`, to be replayed."""
        asked = request.query_params
        limit = _limit(asked.get("limit", str(DEFAULT_LIMIT)))
        form = asked.get("format", "json")
        if form not in ("json", "jsonl"):
            raise bad_request("`format` must be json or jsonl.", "format")
        lines = await decisions(limit)
        if lines is None:
            raise _not_recorded()
        if form == "jsonl":
            return Response(lines, media_type="application/x-ndjson")
        return Response(as_json(lines), media_type="application/json")

    @app.get("/debug/timeline")
    async def debug_timeline() -> Response:
        """Who worked when lately, in the trace event format that Perfetto and chrome://tracing load."""
        trace = await timeline()
        if trace is None:
            raise ApiError(
                404,
                "No timeline is kept on this server. To keep the newest 20000 slices, start it with a "
                "configuration that has `debug: {timeline: 20000}`.",
                code="timeline_not_recorded",
            )
        return Response(trace, media_type="application/json")


def as_json(lines: bytes) -> bytes:
    """The lines of a record as one object: `header`, `calibration`, and in `data` the steps, oldest first."""
    kinds: dict[str, list[msgspec.Raw]] = {"header": [], "calibration": [], "step": []}
    for line in lines.splitlines():
        kinds[_kind.decode(line).record].append(msgspec.Raw(line))
    return msgspec.json.encode(
        {
            "object": "list",
            "header": kinds["header"][0],
            "calibration": kinds["calibration"],
            "data": kinds["step"],
        }
    )


class _Kind(msgspec.Struct):
    record: str


_kind = msgspec.json.Decoder(_Kind)


def _limit(asked: str) -> int:
    try:
        limit = int(asked)
    except ValueError:
        limit = 0
    if not 1 <= limit <= MOST_STEPS:
        raise bad_request(f"`limit` must be a whole number, 1 to {MOST_STEPS}.", "limit")
    return limit


def _not_recorded() -> ApiError:
    return ApiError(
        404,
        "Decisions are not recorded on this server. To keep those of the newest 1000 steps, start it with a "
        "configuration that has `debug: {decisions: 1000}`.",
        code="decisions_not_recorded",
    )
