"""A certificate that is renewed while it is served, as cert-manager and certbot do it."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme

from cluster.grpc_config import GrpcConfig
from cluster.http_config import HttpConfig
from deployments.api_service import ApiService
from deployments.front_end_metrics import FrontEndMetrics
from deployments.grpc_server import make_server
from deployments.http_limits import server_config
from deployments.openai_api import create_app
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from deployments.proto.flotilla.v1 import generation_pb2_grpc as pb_grpc
from deployments.served_certificate import ServedCertificate
from tests.deployments.socket_server import listening
from tests.fakes.tiny_tokenizer import ANSWER

OLD, NEW = datetime(2033, 5, 18, 3, 33, 20, tzinfo=UTC), datetime(2035, 1, 1, tzinfo=UTC)


class Renewer:
    """Authorities and the files of a certificate, first one that the old authority signed."""

    def __init__(self, directory: Path) -> None:
        self.old, self.new = trustme.CA(), trustme.CA()
        self.http = HttpConfig(tls_certificate=directory / "chain.pem", tls_key=directory / "key.pem")
        self.chain, self.key = self.http.tls_certificate, self.http.tls_key
        self.renewed = self.new.issue_cert("localhost", not_after=NEW)
        made = self.old.issue_cert("localhost", not_after=OLD)
        self.write(self.chain, made.cert_chain_pems[0].bytes())
        self.write(self.key, made.private_key_pem.bytes())

    @staticmethod
    def write(path: Path | None, text: bytes) -> None:
        """As a whole, in place of what was there."""
        assert path is not None
        path.with_suffix(".new").write_bytes(text)
        os.replace(path.with_suffix(".new"), path)

    def renew(self) -> None:
        self.write(self.chain, self.renewed.cert_chain_pems[0].bytes())
        self.write(self.key, self.renewed.private_key_pem.bytes())


@pytest.fixture
def renewer(tmp_path: Path) -> Renewer:
    return Renewer(tmp_path)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What the log has been told until now."""
    with caplog.at_level(logging.INFO, "deployments.served_certificate"):
        yield lambda: caplog.messages


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def look_twice(certificate: ServedCertificate) -> None:
    """Files count once they have not changed from one look to the next."""
    certificate.look()
    certificate.look()


async def test_new_https_connections_get_it_and_old_ones_go_on(service: ApiService, renewer: Renewer) -> None:
    certificate = ServedCertificate(renewer.http)
    config = server_config(create_app(service), renewer.http, certificate.ssl_context)
    async with listening(config) as port, httpx.AsyncClient(verify=trusting(renewer.old)) as client:
        url = f"https://localhost:{port}/health"
        assert (await client.get(url)).status_code == 200
        renewer.renew()
        look_twice(certificate)
        assert (await client.get(url)).status_code == 200
        async with httpx.AsyncClient(verify=trusting(renewer.old)) as stranger:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get(url)
        async with httpx.AsyncClient(verify=trusting(renewer.new)) as another:
            assert (await another.get(url)).status_code == 200


async def test_new_grpc_connections_get_it(service: ApiService, renewer: Renewer, free_port: int) -> None:
    certificate = ServedCertificate(renewer.http, for_grpc=True)
    config = GrpcConfig(enabled=True, port=free_port)
    server = make_server(config, service, credentials=certificate.grpc_credentials())
    await server.start()

    async def text(authority: trustme.CA) -> str:
        trust = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        async with grpc.aio.secure_channel(f"localhost:{free_port}", trust) as channel:
            stub: Any = pb_grpc.GenerationStub(channel)
            answer = await stub.Generate(pb.GenerateRequest(prompt="hi", max_tokens=100))
        return str(answer.choices[0].text)

    assert await text(renewer.old) == ANSWER
    renewer.renew()
    look_twice(certificate)
    assert await text(renewer.new) == ANSWER
    assert await text(renewer.new) == ANSWER
    with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
        await text(renewer.old)
    await server.stop(None)


def test_half_of_it_and_what_is_wrong_changes_nothing(
    renewer: Renewer, said: Callable[[], list[str]]
) -> None:
    certificate = ServedCertificate(renewer.http, for_grpc=True)
    served = certificate.current_context
    renewer.write(renewer.chain, renewer.renewed.cert_chain_pems[0].bytes())
    certificate.look()
    assert said() == []  # the key may be on its way
    look_twice(certificate)
    assert [line for line in said() if "cannot be used together" in line] == said()
    assert len(said()) == 1  # not at every look
    assert said()[0].startswith("the certificate that was served until now stays: ")
    for wrong, reason in ((b"-----BEGIN PRIV", "holds no private key in PEM"), (b"", "holds no private key")):
        renewer.write(renewer.key, wrong)
        look_twice(certificate)
        assert reason in said()[-1]
    assert renewer.key is not None
    renewer.key.unlink()
    look_twice(certificate)
    assert said()[-1].endswith(f"there is no {renewer.key}")
    assert certificate.current_context is served
    assert certificate.expires_at == OLD.timestamp()
    renewer.renew()
    look_twice(certificate)
    assert said()[-1] == f"the certificate of {renewer.chain} is served from now on"
    assert certificate.current_context is not served


def test_what_only_grpc_cannot_use_is_not_taken_by_half(
    renewer: Renewer, said: Callable[[], list[str]]
) -> None:
    certificate = ServedCertificate(renewer.http, for_grpc=True)
    served = certificate.current_context
    text = renewer.renewed.cert_chain_pems[0].bytes().replace(b" CERTIFICATE-", b" TRUSTED CERTIFICATE-")
    renewer.write(renewer.chain, text)
    renewer.write(renewer.key, renewer.renewed.private_key_pem.bytes())
    look_twice(certificate)
    assert "cannot be used by gRPC" in said()[-1]
    assert certificate.current_context is served


def test_links_that_change_are_followed(tmp_path: Path) -> None:
    """As Kubernetes changes a mounted secret: both files at once, by one link to their directory."""
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    Renewer(first)
    Renewer(second).renew()
    (tmp_path / "data").symlink_to(first)
    http = HttpConfig(tls_certificate=tmp_path / "data" / "chain.pem", tls_key=tmp_path / "data" / "key.pem")
    certificate = ServedCertificate(http)
    assert certificate.expires_at == OLD.timestamp()
    (tmp_path / "next").symlink_to(second)
    os.replace(tmp_path / "next", tmp_path / "data")
    look_twice(certificate)
    assert certificate.expires_at == NEW.timestamp()


def test_when_it_expires_follows_and_one_that_has_is_warned_of(
    renewer: Renewer, said: Callable[[], list[str]]
) -> None:
    certificate = ServedCertificate(renewer.http)
    metrics = FrontEndMetrics("one", expires_at=lambda: certificate.expires_at)
    name = 'flotilla_tls_certificate_expiry_timestamp_seconds{front_end="one"}'
    assert f"{name} 2e+09" in metrics.render()
    yesterday = datetime.now(UTC).replace(microsecond=0) - timedelta(days=1)
    renewer.renewed = renewer.new.issue_cert(
        "localhost", not_before=yesterday - timedelta(days=9), not_after=yesterday
    )
    renewer.renew()
    look_twice(certificate)
    (line,) = [line for line in metrics.render().splitlines() if line.startswith(name)]
    assert float(line.split()[-1]) == yesterday.timestamp()
    assert f"the certificate expired on {yesterday:%Y-%m-%d}" in said()[-1]
