"""The connections of a server that ends: each client may send the request it is about to send.

A client that keeps a connection sends its next request on it until it is told not to, or sees that it was
closed; closed at the moment of that request, it fails. The head of an answer tells (`connection: close`). Who
got the head of the last answer before the server was to end has not been told, and need not look: so it may
send another request, and hears with the answer that it was the last.
"""

from __future__ import annotations

from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: A server that ends waits so long for a connection's request. Longer than the connections of common clients
#: stay in their pools: 5 s in httpx, and so with OpenAI's and Anthropic's clients, and 4 s in Node's `fetch`.
LAST_REQUEST_S = 6.0

#: So long a client may take to agree that a connection of TLS is over, when nothing is owed to it.
CLOSING_S = 1.0


class EndingProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which at the server's end closes connections at once that are not in use.

    Attributes:
        goes_on: whether others go on serving, so that connections used before are kept a while; else the end
            is not to be held up by who asks nothing.
    """

    goes_on: Callable[[], bool]
    _is_ending = False

    def on_headers_complete(self) -> None:
        """A request is known but for its body."""
        super().on_headers_complete()
        if self._is_ending:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """A request's body is complete; its answer may have been before."""
        super().on_message_complete()
        if self._is_ending and self.is_answered():
            self._await_last_request()

    def on_response_complete(self) -> None:
        """An answer is complete; the connection is closed if it said so."""
        super().on_response_complete()
        if self._is_ending and self.is_answered():
            self._await_last_request()

    def shutdown(self) -> None:
        """The server ends."""
        self._is_ending = True
        if self.is_answered():
            self._await_last_request()
        elif not self.cycle.response_started:
            self.cycle.keep_alive = False

    def is_answered(self) -> bool:
        """Whether no request awaits (more of) its answer, though the last one's body may still come."""
        return self.cycle is None or self.cycle.response_complete

    def is_sending(self) -> bool:
        """Whether a request has begun to come and is not complete."""
        return False

    def _await_last_request(self) -> None:
        if not self.transport.is_closing() and (self.cycle is None or self.is_sending() or self.goes_on()):
            self.loop.call_later(LAST_REQUEST_S, self._end)
        else:
            self._end()

    def _end(self) -> None:
        if not self.is_answered() or self.is_sending():
            return  # the answer tells the client, or the rest does not come in time
        self.transport.close()
        if self.transport.get_extra_info("sslcontext") is not None:
            self.loop.call_later(CLOSING_S, self._hang_up_if_done)

    def _hang_up_if_done(self) -> None:
        """TLS would wait half a minute for the client to agree that it is over."""
        if not self.transport.get_write_buffer_size():
            self.transport.abort()
