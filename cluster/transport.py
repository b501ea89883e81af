"""Length-prefixed frames over a TCP stream: four bytes of length, big-endian, then the message."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator

#: Largest frame either side accepts. Steps stay below 100 kB; a submission holds at most one prompt.
MAX_FRAME_BYTES = 64 << 20
#: Largest call that a worker accepts of its cell. One may open all requests of a cell, each with half a
#: megabyte of allowed tokens.
MAX_CALL_BYTES = 1 << 30
#: With `scheduler.busy_polling`, who expects a message looks for it so long after the one before.
BUSY_POLLING_S = 0.1
#: Who connects sends its token at once. Whoever has not sent all of it after so long is a stray: a port scan,
#: a health check, or a process that was stopped.
TOKEN_S = 5.0

_LENGTH = struct.Struct(">I")


class FrameTooLarge(ConnectionError):
    """A frame above the limit: who announces one does not speak this protocol, so the stream is useless."""


async def read_frame(reader: asyncio.StreamReader, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """The next frame.

    Raises `asyncio.IncompleteReadError` when the stream ends, with empty `partial` if between two frames, and
    `FrameTooLarge` before anything of an oversized frame is read.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > max_bytes:
        raise FrameTooLarge(f"frame of {length} bytes, at most {max_bytes} are accepted")
    return await reader.readexactly(length)


def write_frame(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Queue one frame for sending, without waiting: `await writer.drain()` where back pressure matters.

    Not a coroutine, so that a frame can be sent from a `finally` block of a cancelled task. Who is gone gets
    nothing: asyncio's own transports drop what is written then, uvloop's would raise.
    """
    if not writer.is_closing():
        writer.write(frame(data))


def frame(data: bytes, max_bytes: int | None = None) -> bytes:
    """`data` as one frame, to be sent in one piece. Raises `FrameTooLarge`."""
    most = MAX_FRAME_BYTES if max_bytes is None else max_bytes
    if len(data) > most:
        raise FrameTooLarge(f"frame of {len(data)} bytes, at most {most} are accepted")
    return _LENGTH.pack(len(data)) + data


def take_frames(received: bytearray) -> Iterator[bytes]:
    """The whole frames at the beginning of what was received, removed from it one by one.

    Raises `FrameTooLarge` as soon as one is announced.
    """
    while len(received) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(received)
        if length > MAX_FRAME_BYTES:
            raise FrameTooLarge(f"frame of {length} bytes, at most {MAX_FRAME_BYTES} are accepted")
        end = _LENGTH.size + length
        if len(received) < end:
            return
        data = bytes(received[_LENGTH.size : end])
        del received[:end]
        yield data
