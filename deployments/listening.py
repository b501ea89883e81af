"""Sockets that several front ends of a node listen on."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from contextlib import suppress

# <asm-generic/socket.h> and <linux/filter.h>; a program of classic BPF sees a segment from its TCP header on.
_SO_ATTACH_FILTER = 26
_LOAD_BYTE, _AND, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x54, 0x15, 0x06
_FLAGS_OFFSET, _SYN, _ACK = 13, 0x02, 0x10
_DROP_NEW_CONNECTIONS = b"".join(
    struct.pack("=HBBI", *instruction)
    for instruction in (
        (_LOAD_BYTE, 0, 0, _FLAGS_OFFSET),
        (_AND, 0, 0, _SYN | _ACK),
        (_JUMP_IF_EQUAL, 0, 1, _SYN),
        (_RETURN, 0, 0, 0),
        (_RETURN, 0, 0, 0xFFFFFFFF),
    )
)


def shared_listener(host: str, port: int) -> socket.socket:
    """A bound TCP socket; processes of one node share the port, and the kernel spreads connections.

    Raises:
        OSError: somebody who does not share it has the port, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # Inherited by every connection: without it Nagle's algorithm holds small chunks back for 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port} ({error.strerror})") from None
    return listener


def turn_new_connections_away(listener: socket.socket) -> None:
    """Let no further connection begin, as if the first segment of each were lost on its way.

    A listener that is closed resets the connections which the kernel has made for it and which it has not
    accepted. After this call those can still be accepted, none is added, and it can be closed once it has
    none left. Clients that are turned away notice nothing: their kernels try again after a second, and
    whoever shares the port then gets them.

    Raises:
        OSError: the socket takes no filter (Linux's sockets do).
    """
    if sys.platform != "linux":
        return
    program = ctypes.create_string_buffer(_DROP_NEW_CONNECTIONS, len(_DROP_NEW_CONNECTIONS))
    num_instructions = len(_DROP_NEW_CONNECTIONS) // 8
    # struct sock_fprog: the number of instructions, and where they are.
    pointer = struct.pack("HP", num_instructions, ctypes.addressof(program))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, pointer)


def listening_sockets(port: int) -> list[socket.socket]:
    """Those of this process that listen on a TCP port, for who did not open them, as gRPC's; to be closed.

    Each is another descriptor of the same socket. None is found where there is no `/proc`.
    """
    found = []
    numbers = os.listdir("/proc/self/fd") if sys.platform == "linux" else []
    for number in numbers:
        with suppress(OSError):  # closed meanwhile
            # Of a file, a copy's end would give up the locks that this process has on it.
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            copy = os.dup(int(number))
            try:
                one = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue
            if _listens(one, port):
                found.append(one)
            else:
                one.close()
    return found


def _listens(one: socket.socket, port: int) -> bool:
    if one.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    with suppress(OSError):  # not every kind of socket says so
        return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) and one.getsockname()[1] == port
    return False
