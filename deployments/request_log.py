"""The end of every request: one line in the log with what its receipt says, and whoever else wants to know.

No prompts, outputs or secrets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deployments.errors import ApiError
from deployments.request_context import current_request

if TYPE_CHECKING:
    from deployments.answering import Call

_log = logging.getLogger(__name__)

Listener = Callable[["EndedRequest"], None]
_listeners: list[Listener] = []


@dataclass
class EndedRequest:
    """A request that was answered, failed, or was given up by its client.

    Attributes:
        call: the request, with the outcomes of its choices.
        started: Unix time.
        headers: of trace context.
        finish_reasons: by choice, of those that finished.
        status: "ok", "cancelled", or the code of the error it ended with.
        seconds: from its start to its end.
    """

    call: Call
    started: float
    headers: Mapping[str, str]
    finish_reasons: dict[int, str] = field(default_factory=dict)
    status: str = "ok"
    seconds: float = 0.0

    def summary(self) -> dict[str, Any]:
        """The fields of its line in the log."""
        call = self.call
        fields: dict[str, Any] = {
            "request_id": call.request_id,
            "tier": call.terms.tier,
            "status": self.status,
            "seconds": round(self.seconds, 4),
            "finish_reasons": [self.finish_reasons[index] for index in sorted(self.finish_reasons)],
        }
        if not call.outcomes:
            return fields
        counted: dict[str, Any] = {}
        call.add_usage(counted)
        receipt, used = call.receipt(), counted["usage"]
        speculation = receipt["speculative_decoding"]
        return {
            **fields,
            "prompt_tokens": used["prompt_tokens"],
            "completion_tokens": used["completion_tokens"],
            "queue_ms": receipt["queue_time_ms"],
            "ttft_ms": receipt["time_to_first_token_ms"],
            "tpot_ms": receipt["tpot_ms"],
            "e2e_ms": receipt["e2e_ms"],
            "tier_served": receipt["tier"]["served"],
            "slo_met": receipt["slo"]["met"],
            "verified_tokens": speculation["num_verified_tokens"],
            "accepted_tokens": speculation["num_accepted_draft_tokens"],
            "drafters": receipt["drafters"],
            "preemptions": receipt["num_preemptions"],
        }


def listen(listener: Listener) -> None:
    """Have `listener` told of every request that ends in this process."""
    _listeners.append(listener)


def log_fields() -> dict[str, Any]:
    """Fields of lines logged while a request is answered."""
    request = current_request()
    if request is None or not request.request_id:
        return {}
    key = getattr(request.state.get("grant"), "key", None)
    return {
        "request_id": request.request_id,
        **({"tier": request.tier} if request.tier else {}),
        **({"key": key.name} if key is not None else {}),
    }


@contextmanager
def observed(call: Call) -> Iterator[EndedRequest]:
    """The request while it is answered; tells of its end, whatever that is."""
    context = current_request()
    if context is not None:
        context.tier = call.terms.tier
    begun = time.perf_counter()
    ended = EndedRequest(call, time.time(), context.headers if context is not None else {})
    try:
        yield ended
    except (GeneratorExit, asyncio.CancelledError):
        ended.status = "ok" if call.is_finished else "cancelled"
        raise
    except ApiError as error:
        ended.status = error.code or str(error.status)
        error.is_logged = True
        raise
    except BaseException:
        ended.status = "error"
        raise
    finally:
        ended.seconds = time.perf_counter() - begun
        _tell(ended)


def _tell(ended: EndedRequest) -> None:
    try:
        if _log.isEnabledFor(logging.INFO):
            _log.info("request", extra={"fields": ended.summary()})
        for listener in _listeners:
            listener(ended)
    except Exception:  # the answer is not to fail for the sake of its record
        _log.exception("the end of request %s could not be recorded", ended.call.request_id)
