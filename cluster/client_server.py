"""Where front ends connect: one TCP stream each, carrying the messages of all their requests."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import socket
from collections.abc import Callable

import msgspec

from cluster.stream_messages import CellMessage, ClientMessage
from cluster.transport import TOKEN_S, FrameTooLarge, read_frame, write_frame
from engine.wire import Decoder, encode

_log = logging.getLogger(__name__)

# A front end that does not read is dropped once this much is queued for it; it will reconnect and
# resubmit, and loses nothing.
MAX_QUEUED_BYTES = 32 << 20


class ClientServer:
    """Accepts front ends and passes their messages on.

    Args:
        token: secret a front end sends first.
        on_message: called with the client's name and each message.
        on_lost: called with the client's name when its connection ends.
        heartbeat_s: every front end is sent an empty frame this often, and one as soon as it is admitted.
            They come from the event loop that schedules, so they end when that is stuck.
        token_s: whoever has not sent its token by then is cut off: else each stray would hold a descriptor.
    """

    def __init__(
        self,
        token: bytes,
        on_message: Callable[[str, ClientMessage], None],
        on_lost: Callable[[str], None],
        heartbeat_s: float = 0.5,
        token_s: float = TOKEN_S,
    ) -> None:
        self._token_s = token_s
        self._heartbeat_s = heartbeat_s
        self._beating: asyncio.TimerHandle | None = None
        self._token = token
        self._on_message = on_message
        self._on_lost = on_lost
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._names = (f"front-end-{n}" for n in itertools.count())
        self._decoder: Decoder[ClientMessage] = Decoder(ClientMessage)
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> tuple[str, int]:
        """Listen; returns the address."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        self._beat()
        name = self._server.sockets[0].getsockname()
        return str(name[0]), int(name[1])

    def send(self, client: str, message: CellMessage) -> None:
        """Queue a message for a front end; messages to one that is gone are dropped."""
        writer = self._writers.get(client)
        if writer is None:
            return
        if writer.transport.get_write_buffer_size() > MAX_QUEUED_BYTES:
            _log.error("%s does not read; dropping its connection", client)
            writer.transport.abort()
            return
        try:
            write_frame(writer, encode(message))
        except FrameTooLarge as error:  # whoever sends messages must not take it for the loss of a worker
            _log.error("%s: %s; dropping its connection", client, error)
            writer.transport.abort()

    async def close(self) -> None:
        """Stop listening and drop all connections."""
        if self._beating is not None:
            self._beating.cancel()
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers.values()):
            writer.close()

    def _beat(self) -> None:
        for writer in self._writers.values():
            # Who has something else to read, or does not read, needs no sign of life.
            if not writer.is_closing() and not writer.transport.get_write_buffer_size():
                write_frame(writer, b"")
        self._beating = asyncio.get_running_loop().call_later(self._heartbeat_s, self._beat)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = ""
        try:
            async with asyncio.timeout(self._token_s):
                token = await read_frame(reader, 1024)
            if not hmac.compare_digest(token, self._token):
                _log.warning("front end with a wrong token refused")
                return
            write_frame(writer, b"")
            name = next(self._names)
            self._writers[name] = writer
            while True:
                self._on_message(name, self._decoder.decode(await read_frame(reader)))
        except (asyncio.IncompleteReadError, ConnectionError, FrameTooLarge, TimeoutError):
            _log.info("%s disconnected", name or "a front end")
        except msgspec.ValidationError as error:
            _log.error("%s sent a message this cell does not understand: %s", name, error)
        finally:
            writer.close()
            if name:
                del self._writers[name]
                self._on_lost(name)
