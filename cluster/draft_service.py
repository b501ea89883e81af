"""Draft calls answered by a drafter, whether behind a port of its own or in the cell's process."""

from __future__ import annotations

import logging

from drafters.messages import DraftCall, DraftResult
from drafters.protocol import Drafter
from engine.wire import Decoder, encode

_log = logging.getLogger(__name__)


class DraftService:
    """A drafter as others call it: in their process, or by messages.

    In the cell's process it is called where the way to another would be longer than its work. Measured for
    decoding heads on a busy machine: 0.01, 0.09 and 0.37 ms for 1, 8 and 32 requests in place, 0.19, 0.40 and
    1.06 ms over the step transport.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._decoder: Decoder[DraftCall] = Decoder(DraftCall)
        self._opened: set[str] = set()

    def draft(self, call: DraftCall) -> DraftResult:
        """Draft. A drafter's bug costs speculation, never a request: all of them go on without drafts."""
        self._opened.difference_update(call.release)
        self._opened.update([item.request_id for item in call.items if item.spec is not None])
        try:
            return self.drafter.draft(call)
        except Exception:
            # A drafter's bug costs speculation, never a request: all of them go on without drafts.
            _log.exception("draft call %d failed", call.call_id)
            unknown = [item.request_id for item in call.items]
            return DraftResult(call_id=call.call_id, drafts=[], unknown=unknown)

    def answer(self, data: bytes) -> bytes:
        """The same of a call's bytes, with the answer's."""
        return encode(self.draft(self._decoder.decode(data)))

    def forget_all(self) -> None:
        """Drop all requests: those of a scheduler that is gone."""
        self.drafter.draft(DraftCall(call_id=0, items=[], release=list(self._opened)))
        self._opened.clear()
