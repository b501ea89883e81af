"""Standard output and error of a server, which goes on when nobody reads them any more."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO


@contextmanager
def lasting_output() -> Iterator[None]:
    """While it lasts, writing to `sys.stdout` and `sys.stderr` never fails.

    What their reader does not take is dropped: `| head` has read enough, the terminal was closed, the disk
    under a log is full. Else a server that serves would end for the sake of a line, and in the midst of
    ending would leave on a Ray cluster what it was to remove.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _lasting(sys.stdout), _lasting(sys.stderr)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _LastingStream):
                stream.flush()
                stream.detach()
        sys.stdout, sys.stderr = before


def _lasting(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # nothing of the operating system's, as in tests
        return stream
    stream.flush()
    return _LastingStream(
        stream.buffer,
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _LastingStream(io.TextIOWrapper):
    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError:
            self._end()
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            self._end()

    def _end(self) -> None:
        """Nobody reads: from here on, and with what is still buffered, it goes nowhere."""
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
