"""Calls that open many requests at once may be longer than anything else that is sent."""

from __future__ import annotations

import asyncio

import pytest

from cluster import transport
from cluster.step_client import StepClient
from cluster.step_server import StepServer

TOKEN = b"secret"


async def test_a_call_may_be_longer_than_other_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of 160 requests with all tokens allowed by name was not sent, and its target taken for stuck."""
    monkeypatch.setattr(transport, "MAX_FRAME_BYTES", 1000)
    server = StepServer(lambda data: str(len(data)).encode(), TOKEN, "127.0.0.1")
    answered: asyncio.Queue[bytes] = asyncio.Queue()
    client = await StepClient.connect("w", server.address, TOKEN, answered.put_nowait, lambda: None)
    client.send(b"x" * (65 << 20))
    assert await asyncio.wait_for(answered.get(), 20) == str(65 << 20).encode()
    await client.close()
    server.close()
