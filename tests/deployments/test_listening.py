"""Front ends that share a port: one can go without breaking a connection."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import suppress

import pytest

from deployments.listening import shared_listener, turn_new_connections_away


def _other(listener: socket.socket) -> socket.socket:
    host, port = listener.getsockname()[:2]
    found = shared_listener(host, port)
    found.listen(2048)
    return found


@pytest.fixture(params=["127.0.0.1", pytest.param("::1", marks=pytest.mark.thorough)])
def stays(request: pytest.FixtureRequest) -> socket.socket:
    listener = shared_listener(request.param, 0)
    listener.listen(2048)
    return listener


def test_connections_made_before_are_accepted_and_none_after(stays: socket.socket) -> None:
    address = stays.getsockname()[:2]
    before = [socket.create_connection(address, timeout=5) for _ in range(3)]
    turn_new_connections_away(stays)
    with pytest.raises(TimeoutError):
        socket.create_connection(address, timeout=0.3)
    stays.settimeout(0.1)
    accepted = [stays.accept()[0] for _ in before]
    with pytest.raises(TimeoutError):
        stays.accept()
    for client, server in zip(before, accepted, strict=True):
        client.sendall(b"asked")
        server.settimeout(5)
        assert server.recv(16) == b"asked"
        server.sendall(b"answered")
        assert client.recv(16) == b"answered"
        client.close()
        server.close()
    stays.close()


def test_a_client_turned_away_is_taken_by_another_who_shares_the_port(stays: socket.socket) -> None:
    """Its kernel tries again after a second."""
    address = stays.getsockname()[:2]
    goes = _other(stays)
    turn_new_connections_away(goes)
    clients: list[socket.socket] = []
    for _ in range(40):  # the kernel chooses a listener by a hash of the client's port
        client = socket.socket(stays.family)
        client.setblocking(False)
        with suppress(BlockingIOError):
            client.connect(address)
        clients.append(client)
    time.sleep(0.1)
    goes.close()
    stays.settimeout(5)
    began = time.monotonic()
    accepted = [stays.accept()[0] for _ in clients]
    assert time.monotonic() - began > 0.3, "none was turned away"
    for one in (*clients, *accepted, stays):
        one.close()


def test_nobody_who_connects_meanwhile_is_cut_off(stays: socket.socket) -> None:
    """Others come and go beside one that stays, while clients make one connection after another."""
    address = stays.getsockname()[:2]
    stop = threading.Event()
    problems: list[OSError] = []
    num_answered = 0

    def ask() -> None:
        nonlocal num_answered
        while not stop.is_set():
            try:
                with socket.create_connection(address, timeout=10) as client:
                    client.sendall(b"asked")
                    if client.recv(16) != b"asked":
                        raise ConnectionError("closed without an answer")
                    num_answered += 1
            except OSError as error:
                problems.append(error)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(16))
        await writer.drain()
        writer.close()

    async def serve_and_leave() -> None:
        last = await asyncio.start_server(answer, sock=stays)
        askers = [threading.Thread(target=ask) for _ in range(4)]
        for asker in askers:
            asker.start()
        for _ in range(4):
            listener = _other(stays)
            server = await asyncio.start_server(answer, sock=listener)
            await asyncio.sleep(0.3)
            turn_new_connections_away(listener)
            await asyncio.sleep(0.3)
            server.close()
        stop.set()
        await asyncio.to_thread(lambda: [asker.join() for asker in askers])
        last.close()

    asyncio.run(serve_and_leave())
    assert not problems
    assert num_answered > 50
