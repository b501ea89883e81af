"""Requests of one connection that are sent before the answers to those in front of them have come."""

from __future__ import annotations

import json
import logging

import pytest

from cluster.http_config import HttpConfig
from deployments.api_service import ApiService
from tests.deployments.test_early_answers import HEALTH, connected
from tests.deployments.test_http_limits import serving
from tests.fakes.cell_stand_in import CellStandIn, eventually

LIMITS = HttpConfig(port=0, read_timeout_s=30.0, request_timeout_s=None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("behind", [b"", HEALTH, HEALTH * 3], ids=["none", "one", "three"])
async def test_hanging_up_ends_the_request_that_is_being_answered(
    service: ApiService,
    cell: CellStandIn,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
    behind: bytes,
) -> None:
    """With others behind it, it went on to its end, or until it wrote to nobody: an error, in every log."""
    cell.script = lambda submit: [5] * 30
    cell.pause_s = 0.05
    body = json.dumps({"prompt": "hi", "max_tokens": 30, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    asked = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    async with serving(service, LIMITS) as port, connected(port) as (answer, _, writer):
        writer.write(HEALTH)
        await answer()
        writer.write(asked + behind)
        await eventually(lambda: len(cell.submissions) == 1)
        writer.transport.abort()
        await eventually(lambda: len(cell.cancels) == 1, within_s=3.0)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
