"""Sockets that several front ends of a node listen on."""

from __future__ import annotations

import socket


def shared_listener(host: str, port: int) -> socket.socket:
    """A bound TCP socket; processes of one node share the port, and the kernel spreads connections."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # Inherited by every connection: without it Nagle's algorithm holds small chunks back for 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.bind((host, port))
    return listener
