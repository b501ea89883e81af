"""Draft calls answered by a drafter, whether behind a port of its own or in the cell's process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from drafters.messages import DraftCall, DraftResult
from drafters.protocol import Drafter
from engine.wire import Decoder, encode

_log = logging.getLogger(__name__)


class DraftService:
    """Turns a call's bytes into the answer's."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._decoder: Decoder[DraftCall] = Decoder(DraftCall)
        self._opened: set[str] = set()

    def answer(self, data: bytes) -> bytes:
        """Draft. A drafter's bug costs speculation, never a request: all of them go on without drafts."""
        call = self._decoder.decode(data)
        self._opened.difference_update(call.release)
        self._opened.update(item.request_id for item in call.items if item.spec is not None)
        try:
            return encode(self.drafter.draft(call))
        except Exception:
            # A drafter's bug costs speculation, never a request: all of them go on without drafts.
            _log.exception("draft call %d failed", call.call_id)
            unknown = [item.request_id for item in call.items]
            return encode(DraftResult(call_id=call.call_id, drafts=[], unknown=unknown))

    def forget_all(self) -> None:
        """Drop all requests: those of a scheduler that is gone."""
        self.drafter.draft(DraftCall(call_id=0, items=[], release=list(self._opened)))
        self._opened.clear()


class InPlaceDrafter:
    """Stands where a `StepClient` does, for a drafter whose work is less than the way to another process.

    Measured for decoding heads on a busy machine: 0.01, 0.09 and 0.37 ms for 1, 8 and 32 requests in place,
    0.19, 0.40 and 1.06 ms over the step transport.
    """

    def __init__(self, drafter: Drafter, on_answer: Callable[[bytes], None]) -> None:
        """Hand answers to `on_answer`, from the event loop and never within `send`."""
        self._service = DraftService(drafter)
        self._on_answer = on_answer
        self._is_closed = False

    def send(self, call: bytes) -> None:
        """Answer one call; the answer is heard in the next turn of the event loop."""
        asyncio.get_running_loop().call_soon(self._hear, self._service.answer(call))

    async def close(self) -> None:
        """Nothing is heard any more."""
        self._is_closed = True

    def _hear(self, answer: bytes) -> None:
        if not self._is_closed:
            self._on_answer(answer)
