"""Warnings and errors of all processes, shown on the console where `flotilla serve` runs.

They travel as datagrams to a socket in the session of Ray: nothing is kept for a console that is not there,
as in Kubernetes, and no process waits for one that is slow. Processes of other machines are not heard.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from logging.handlers import DatagramHandler
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cluster.logs import Fields

if TYPE_CHECKING:  # replicas print nothing
    from rich.console import Console

#: `extra=` of a line that the console has shown already.
IS_SHOWN = {"is_shown": True}

#: Within the session's `sockets`, of which Ray keeps the paths short enough.
_SOCKET = ("sockets", "flotilla_log")
_MOST_CHARACTERS = 500
#: So many lines are shown in so many seconds, each once; whoever wants to read more has the files.
_MOST_LINES = 10
_PERIOD_S = 10.0
_LOOK_S = 0.5
_STYLES = {"warning": "yellow", "error": "red", "critical": "red"}


class _Line(msgspec.Struct):
    """One warning or error, as it travels."""

    level: str
    process: str
    message: str


class MirrorHandler(DatagramHandler):
    """Sends warnings and errors to the console of this machine's `flotilla serve`, if there is one.

    Args:
        session: directory of Ray's session.
        process: who sends them, as fields of its lines.
    """

    def __init__(self, session: Path, process: Fields) -> None:
        super().__init__(str(session.joinpath(*_SOCKET)), None)
        self.setLevel(logging.WARNING)
        self.addFilter(lambda record: not getattr(record, "is_shown", False))
        self._process = " ".join(f"{name} {value}" for name, value in process.items())

    def makeSocket(self, timeout: float = 0.0) -> socket.socket:
        """One that nobody waits for."""
        made = super().makeSocket()
        made.setblocking(False)
        return made

    def makePickle(self, record: logging.LogRecord) -> bytes:
        """What travels: JSON; of an exception what it is, as its traceback is in the file."""
        message = record.getMessage()
        if record.exc_info and (error := record.exc_info[1]) is not None:
            message += f" ({_last_line(error)})"
        line = _Line(record.levelname.lower(), self._process, _plain(message)[:_MOST_CHARACTERS])
        return msgspec.json.encode(line)

    def handleError(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`; that nobody looks, or not fast enough, is no error."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def _last_line(error: BaseException) -> str:
    """What an exception says; of one from another process, whose traceback Ray puts before that, the end."""
    return "".join(traceback.format_exception_only(error)).strip().rpartition("\n")[2]


def _plain(text: str) -> str:
    """In one line, without what terminals take as commands."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


class ShownLog:
    """Prints what `MirrorHandler`s of this machine send, until it is closed.

    Args:
        console: where.
        session: directory of Ray's session.
        logs: where the whole log is, for whom more is to be read.
        clock: in seconds.
    """

    def __init__(
        self, console: Console, session: Path, logs: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._logs, self._clock = console, logs, clock
        self._path = session.joinpath(*_SOCKET)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)  # of a `flotilla serve` that was killed
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self._path))
        self._socket.settimeout(_LOOK_S)
        self._since, self._num_left_out = clock(), 0
        self._shown: set[tuple[str, str]] = set()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="shown log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Show nothing from here on."""
        self._is_closed = True
        self._path.unlink(missing_ok=True)
        self._thread.join(timeout=2.0)
        self._socket.close()

    def _run(self) -> None:
        while not self._is_closed:
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                self._go_on()
                continue
            except OSError:
                return
            self._go_on()
            try:
                line = msgspec.json.decode(data, type=_Line)
            except msgspec.DecodeError:
                continue
            if not self._is_closed:
                self._show(line)

    def _show(self, line: _Line) -> None:
        if (line.process, line.message) in self._shown:
            return
        if len(self._shown) == _MOST_LINES:
            self._num_left_out += 1
            return
        self._shown.add((line.process, line.message))
        self._print(f"{line.level}: {line.message} [{line.process}]", _STYLES.get(line.level, ""))

    def _go_on(self) -> None:
        """Once a while is over, tell what was left out of it, and begin another."""
        if self._clock() < self._since + _PERIOD_S:
            return
        if self._num_left_out:
            self._print(f"{self._num_left_out} more warnings and errors are in {self._logs}", "yellow")
        self._since, self._num_left_out = self._clock(), 0
        self._shown.clear()

    def _print(self, text: str, style: str) -> None:
        when = time.strftime("%H:%M:%S")
        self._console.print(f"{when} {text}", style=style, markup=False, highlight=False, soft_wrap=True)
