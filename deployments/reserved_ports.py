"""Ports that are this program's from the start."""

from __future__ import annotations

import socket

from deployments.listening import shared_listener


class ReservedPorts:
    """Ports that nobody but this program's front ends can get.

    A front end listens seconds after its port was found free, when Ray has started dozens of processes whose
    connections take any port that is; the same may happen while a front end is replaced. Here the port is
    bound meanwhile, as one that is shared: only sockets of the same user that share it too can be bound to
    it, and since this one never listens, it gets no connection.
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def reserve(self, host: str, port: int) -> int:
        """Keep a port, 0 for any that is free, until `release`; returns which.

        Raises:
            OSError: it is taken, or there is no such address on this machine.
        """
        held = shared_listener(host, port)
        self._sockets.append(held)
        return int(held.getsockname()[1])

    def release(self) -> None:
        """Give all of them back."""
        while self._sockets:
            self._sockets.pop().close()
