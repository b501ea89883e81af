"""SIGHUP, which asks a server to read its configuration again, or tells that its terminal was closed."""

from __future__ import annotations

import os
import signal


class Hangups:
    """Those that ask for something; from the start on, as by itself the signal ends a process.

    One that comes as the terminal goes from which the process was started does what SIGTERM does, and
    nothing under `nohup`: nobody asked for another configuration.

    Attributes:
        number: how many there were since it was set to zero.
    """

    def __init__(self) -> None:
        self.number = 0
        self._had_terminal = _has_terminal()
        self._outlives_it = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        had_terminal, self._had_terminal = self._had_terminal, _has_terminal()
        if self._had_terminal or not had_terminal:
            self.number += 1
        elif not self._outlives_it:
            signal.raise_signal(signal.SIGTERM)


def _has_terminal() -> bool:
    """Whether the process has one; no longer once it was closed, and services never."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
