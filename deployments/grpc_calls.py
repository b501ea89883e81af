"""A gRPC call while it is answered: counted, timed, and known to whatever is logged on its way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from deployments import grpc_mapping as mapping
from deployments.call_ids import clean_request_id
from deployments.errors import ApiError, internal
from deployments.front_end_metrics import FrontEndMetrics
from deployments.refusals import code_of, log_refusal
from deployments.request_context import TRACE_CONTEXT, RequestContext

_log = logging.getLogger(__name__)


@contextmanager
def counted(
    metrics: FrontEndMetrics,
    method: str,
    metadata: Mapping[str, str],
    request_id: str = "",
    ends_at: float | None = None,
) -> Iterator[RequestContext]:
    """The call within, which is the present request there (`request_context`).

    Args:
        metrics: count it, by `method` and by what it ends with.
        method: its name, without the service's.
        metadata: what the client sent.
        request_id: how the message calls it; as the metadata do if empty, and else by a new id.
        ends_at: when it has to be over, by the loop's time: cancelled then or later, it was too late.

    Raises:
        ApiError: a 500 for whatever was raised that is none.
    """
    named = clean_request_id(request_id or metadata.get(mapping.REQUEST_ID_KEY, ""))
    trace = {name: metadata[name] for name in TRACE_CONTEXT if name in metadata}
    with RequestContext({"request_id": named}, trace).entered() as request, metrics.grpc_call(method) as ends:
        try:
            yield request
        except ApiError as error:
            status = mapping.status(error)[0].name
            ends(status)
            metrics.refused("grpc", code_of(error))
            log_refusal(error, status=status, method=method, request_id=named)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            is_late = ends_at is not None and asyncio.get_running_loop().time() >= ends_at
            ends("DEADLINE_EXCEEDED" if is_late else "CANCELLED")
            raise
        except Exception as error:  # a bug
            _log.exception("request %s failed", named)
            bug = internal(named)
            ends(mapping.status(bug)[0].name)
            metrics.refused("grpc", code_of(bug))
            raise bug from error
