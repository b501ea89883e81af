"""What is left of requests in a served system once nobody asks anything."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp

from benchmarks.live_system import LiveSystem, Scrape

_GAUGES = (
    "flotilla_requests_running",
    "flotilla_requests_waiting",
    "flotilla_drafter_requests",
    "flotilla_http_streams_open",
)
_POLL_S = 0.5


def left_in(scrape: Scrape) -> dict[str, float]:
    """Requests in the cells' and drafters' books and at front ends; all zero in an idle system."""
    found = {name: scrape.total(name) for name in _GAUGES}
    # The scrape itself is being answered.
    found["flotilla_http_requests_open"] = max(0.0, scrape.total("flotilla_http_requests_open") - 1.0)
    found["streams of front ends"] = scrape.total("flotilla_scaling_signal", signal="streams")
    return found


async def left_when_idle(
    system: LiveSystem, session: aiohttp.ClientSession, within_s: float = 10.0
) -> dict[str, Any]:
    """`left_in`, as soon as all of it is zero, or after so long."""
    deadline = time.monotonic() + within_s
    while True:
        scrape = await system.scrape(session)
        found: dict[str, Any] = {"no answer": 1.0} if scrape is None else left_in(scrape)
        if not any(found.values()) or time.monotonic() > deadline:
            return found
        await asyncio.sleep(_POLL_S)
