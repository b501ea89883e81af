"""A port found free at the start is still there seconds later, and only for who shares it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from deployments.listening import shared_listener
from deployments.reserved_ports import ReservedPorts


@pytest.fixture
def ports() -> Iterator[ReservedPorts]:
    made = ReservedPorts()
    yield made
    made.release()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_nobody_else_gets_a_reserved_port(ports: ReservedPorts, host: str) -> None:
    port = ports.reserve(host, 0)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as other:
        with pytest.raises(OSError, match="in use"):
            other.bind((host, port))
        ports.release()
        other.bind((host, port))


def test_the_kernel_gives_it_to_no_connection_either(ports: ReservedPorts) -> None:
    """Outgoing connections take ports of the same range; this one asks for the very port."""
    port = ports.reserve("127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(OSError, match="in use"):
        socket.create_connection(server.getsockname(), timeout=5, source_address=("127.0.0.1", port))


def test_who_shares_it_gets_every_connection(ports: ReservedPorts) -> None:
    port = ports.reserve("127.0.0.1", 0)
    with shared_listener("127.0.0.1", port) as listener:
        listener.listen()
        listener.settimeout(5)
        for _ in range(50):  # the kernel chooses a listener by a hash of the client's port
            with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
                accepted, address = listener.accept()
                accepted.close()
                assert address == client.getsockname()


def test_a_taken_port_cannot_be_reserved(ports: ReservedPorts) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(OSError, match=r"127\.0\.0\.1:.* already in use"),
    ):
        ports.reserve("127.0.0.1", taken.getsockname()[1])
