"""HTTPS and gRPC over TLS with a certificate made here, and what is refused and warned of before a start."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme
import uvicorn
from cryptography.hazmat.primitives import serialization
from pydantic import ValidationError

from cluster.config import FlotillaConfig
from cluster.grpc_config import GrpcConfig
from cluster.http_config import HttpConfig
from deployments import preflight
from deployments.api_keys import new_key
from deployments.api_service import ApiService
from deployments.demo import demo_config
from deployments.exposure import exposure_warnings, is_loopback
from deployments.grpc_server import make_server
from deployments.grpc_start import await_grpc
from deployments.http_limits import server_config
from deployments.last_requests import CLOSING_S, LAST_REQUEST_S
from deployments.openai_api import create_app
from deployments.preflight import StartError
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from deployments.proto.flotilla.v1 import generation_pb2_grpc as pb_grpc
from deployments.served_certificate import ServedCertificate
from tests.deployments.socket_server import Server
from tests.fakes.tiny_tokenizer import ANSWER


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def tls(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> HttpConfig:
    directory = tmp_path_factory.mktemp("tls")
    certificate = authority.issue_cert("localhost")
    chain, key = directory / "chain.pem", directory / "key.pem"
    chain.write_bytes(b"".join(part.bytes() for part in certificate.cert_chain_pems))
    certificate.private_key_pem.write_to_path(key)
    return HttpConfig(tls_certificate=chain, tls_key=key)


@pytest.fixture
def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def serving(service: ApiService, http: HttpConfig) -> tuple[uvicorn.Server, asyncio.Task[None], int]:
    """A server, its task, and its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(server_config(create_app(service), http, ServedCertificate(http).ssl_context))
    task = asyncio.create_task(server.serve([listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    return server, task, listener.getsockname()[1]


async def test_https_is_served_to_who_trusts_the_authority(
    service: ApiService, tls: HttpConfig, trusting: ssl.SSLContext
) -> None:
    server, task, port = await serving(service, tls)
    async with httpx.AsyncClient(verify=trusting) as client:
        answer = await client.post(
            f"https://localhost:{port}/v1/completions", json={"prompt": "hi", "max_tokens": 100}
        )
        assert answer.json()["choices"][0]["text"] == ANSWER
    async with httpx.AsyncClient() as stranger:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await stranger.get(f"https://localhost:{port}/health")
        with pytest.raises(httpx.HTTPError):
            await stranger.get(f"http://localhost:{port}/health")
    server.should_exit = True
    await task


async def test_a_client_that_does_not_close_holds_up_no_end(
    service: ApiService, tls: HttpConfig, trusting: ssl.SSLContext
) -> None:
    """As a pool of connections that nobody reads: to agree that it is over it would have half a minute."""
    server, task, port = await serving(service, tls)

    def ask() -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", port))
        client = trusting.wrap_socket(plain, server_hostname="localhost")
        client.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        assert b" 200 " in client.recv(4096)
        return client

    with await asyncio.to_thread(ask):
        server.should_exit = True
        await asyncio.wait_for(task, LAST_REQUEST_S + CLOSING_S + 10.0)


async def test_grpc_is_served_with_the_same_certificate(
    service: ApiService, tls: HttpConfig, authority: trustme.CA, free_port: int
) -> None:
    server = make_server(
        GrpcConfig(enabled=True, port=free_port),
        service,
        credentials=ServedCertificate(tls).grpc_credentials(),
    )
    await server.start()
    await asyncio.to_thread(await_grpc, f"127.0.0.1:{free_port}", 5.0, has_tls=True)
    trusting = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    async with grpc.aio.secure_channel(f"localhost:{free_port}", trusting) as channel:
        answer = await pb_grpc.GenerationStub(channel).Generate(
            pb.GenerateRequest(prompt="hi", max_tokens=100)
        )
        assert answer.choices[0].text == ANSWER
    async with grpc.aio.insecure_channel(f"localhost:{free_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await pb_grpc.GenerationStub(channel).Generate(pb.GenerateRequest(prompt="hi"), timeout=2)
    await server.stop(None)


def test_nobody_behind_the_address_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(StartError, match="does not answer with TLS"):
        await_grpc(f"127.0.0.1:{port}", 0.1, has_tls=True)


def config(**sections: dict[str, Any]) -> FlotillaConfig:
    raw = demo_config().model_dump()
    raw["http"]["port"] = 0
    for name, changes in sections.items():
        raw[name].update(changes)
    return FlotillaConfig.model_validate(raw)


def test_half_a_certificate_and_what_cannot_be_encrypted_are_refused(tls: HttpConfig) -> None:
    with pytest.raises(ValidationError, match="come together"):
        HttpConfig(tls_certificate=Path("c.pem"))
    both = {"tls_certificate": tls.tls_certificate, "tls_key": tls.tls_key}
    with pytest.raises(ValidationError, match=r"gRPC proxy cannot serve with TLS"):
        config(http=both, grpc={"enabled": True, "direct": False, "host": "::"})
    assert config(http=both).http.scheme == "https"
    assert config().http.scheme == "http"


def test_certificates_are_checked_before_anything_starts(
    tls: HttpConfig, authority: trustme.CA, tmp_path: Path
) -> None:
    assert tls.tls_certificate is not None
    good = {"tls_certificate": tls.tls_certificate, "tls_key": tls.tls_key}
    assert preflight.check(config(http=good)) == []
    other = tmp_path / "other.pem"
    authority.issue_cert("localhost").private_key_pem.write_to_path(other)
    encrypted = tmp_path / "encrypted.pem"
    key = serialization.load_pem_private_key(other.read_bytes(), password=None)
    encrypted.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    for wrong, said in (
        ({**good, "tls_key": other}, "cannot be used together"),
        ({**good, "tls_key": tls.tls_certificate}, "holds no private key in PEM"),
        ({**good, "tls_certificate": tls.tls_key}, "holds no certificate in PEM"),
        ({**good, "tls_key": encrypted}, "is encrypted"),
        ({**good, "tls_certificate": tmp_path / "absent.pem"}, "there is no .*absent.pem"),
        ({**good, "tls_key": tmp_path}, f"tls_key: cannot read {tmp_path}: Is a directory"),
    ):
        with pytest.raises(StartError, match=said):
            preflight.check(config(http=wrong))


def test_a_key_that_only_root_may_read_is_told(tls: HttpConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As certbot leaves them: `flotilla serve` ended with a traceback. (Tests may run as root.)"""
    read = Path.read_text

    def as_somebody(path: Path, *args: Any, **kwargs: Any) -> str:
        if path == tls.tls_key:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", as_somebody)
    with pytest.raises(StartError, match=f"http.tls_key: cannot read {tls.tls_key}: Permission denied"):
        preflight.check(config(http={"tls_certificate": tls.tls_certificate, "tls_key": tls.tls_key}))


def test_who_listens_for_others_without_keys_is_warned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLOTILLA_API_KEY", raising=False)
    assert preflight.check(config()) == []
    (warning,) = preflight.check(config(http={"host": "0.0.0.0"}))
    assert "ANYBODY" in warning
    assert "flotilla keys create" in warning
    with pytest.raises(StartError, match="require_keys is set"):
        preflight.check(config(security={"require_keys": True}))
    monkeypatch.setenv("FLOTILLA_API_KEY", new_key())
    (warning,) = preflight.check(config(http={"host": "0.0.0.0"}, security={"require_keys": True}))
    assert "in the clear to http.host 0.0.0.0; set" in warning
    monkeypatch.setenv("FLOTILLA_API_KEY", "short")
    with pytest.raises(StartError, match="FLOTILLA_API_KEY"):
        preflight.check(config())
    monkeypatch.delenv("FLOTILLA_API_KEY")
    with pytest.raises(StartError, match="cannot read the keys"):
        preflight.check(config(security={"keys_file": tmp_path / "absent.yaml"}))
    grpc_open = config(grpc={"enabled": True, "host": "::"}, metrics={"host": "0.0.0.0", "port": 9100})
    warnings = exposure_warnings(grpc_open, wants_keys=False)
    assert ["grpc.host ::" in text for text in warnings] == [True, False]
    assert "9100" in warnings[1]


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False),
     ("::", False), ("10.0.0.1", False), ("example.com", False), ("", False)],
)  # fmt: skip
def test_what_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected


def test_a_demo_is_safe_by_default() -> None:
    plain = demo_config()
    assert is_loopback(plain.http.host)
    assert is_loopback(plain.grpc.host)
    assert is_loopback(plain.metrics.host)
    assert not plain.http.admin
    assert not plain.grpc.enabled
    assert not plain.target.trust_remote_code
    assert plain.http.request_timeout_s is not None
