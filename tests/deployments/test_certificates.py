"""Certificates that clients will not take, and how people are told before their clients are."""

from __future__ import annotations

import codecs
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from cryptography import x509

from cluster.config import FlotillaConfig
from cluster.grpc_config import GrpcConfig
from cluster.http_config import HttpConfig
from deployments import preflight
from deployments.api_service import ApiService
from deployments.certificates import expires_at, validities
from deployments.demo import demo_config
from deployments.front_end_metrics import FrontEndMetrics
from deployments.grpc_server import make_server
from deployments.preflight import StartError
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from deployments.proto.flotilla.v1 import generation_pb2_grpc as pb_grpc
from deployments.served_certificate import ServedCertificate
from tests.fakes.tiny_tokenizer import ANSWER

NOW = datetime.now(UTC)
DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def written(directory: Path, made: trustme.LeafCert, mark: bytes = b"") -> dict[str, Any]:
    """The settings of a certificate, in files that begin with `mark`."""
    chain, key = directory / "chain.pem", directory / "key.pem"
    chain.write_bytes(mark + b"".join(part.bytes() for part in made.cert_chain_pems))
    key.write_bytes(mark + made.private_key_pem.bytes())
    return {"tls_certificate": chain, "tls_key": key}


def config(http: dict[str, Any], *, with_grpc: bool = False) -> FlotillaConfig:
    raw = demo_config().model_dump()
    raw["http"].update(http, port=0)
    raw["grpc"].update(enabled=with_grpc, port=0)
    return FlotillaConfig.model_validate(raw)


@pytest.mark.parametrize(
    ("begins", "ends", "said"),
    [
        (NOW - 9 * DAY, NOW - DAY, f"the certificate expired on {NOW - DAY:%Y-%m-%d at %H:%M} UTC"),
        (NOW + DAY, NOW + 9 * DAY, f"the certificate is not valid before {NOW + DAY:%Y-%m-%d at %H:%M} UTC"),
    ],
)
def test_a_certificate_whose_time_it_is_not_is_warned_of(
    authority: trustme.CA, tmp_path: Path, begins: datetime, ends: datetime, said: str
) -> None:
    """The server started without a word, and no client that checks certificates could connect."""
    http = written(tmp_path, authority.issue_cert("localhost", not_before=begins, not_after=ends))
    (warning,) = preflight.check(config(http))
    assert said in warning
    assert str(http["tls_certificate"]) in warning


def test_so_is_one_between_it_and_the_root(authority: trustme.CA, tmp_path: Path) -> None:
    http = written(tmp_path, authority.issue_cert("localhost"))
    old = authority.issue_cert("localhost", not_before=NOW - 9 * DAY, not_after=NOW - DAY)
    with http["tls_certificate"].open("ab") as file:
        file.write(b"\nwhat comes between\n" + old.cert_chain_pems[0].bytes())
    (warning,) = preflight.check(config(http))
    assert "certificate 2 of the file expired" in warning


@pytest.mark.parametrize(
    "ends", [datetime(2049, 12, 31, 23, 59, 59, tzinfo=UTC), datetime(2120, 1, 2, tzinfo=UTC)]
)
def test_times_are_read_as_they_are_meant(authority: trustme.CA, tmp_path: Path, ends: datetime) -> None:
    """They are written in one way until 2049, and in another from then on."""
    http = written(tmp_path, authority.issue_cert("localhost", not_after=ends))
    theirs = x509.load_pem_x509_certificate(http["tls_certificate"].read_bytes())
    assert validities(http["tls_certificate"]) == [(theirs.not_valid_before_utc, ends)]


def test_when_it_expires_is_a_metric(authority: trustme.CA, tmp_path: Path) -> None:
    """For an alert: the server goes on, and says nothing more, while its certificate expires."""
    http = written(
        tmp_path, authority.issue_cert("localhost", not_after=datetime(2033, 5, 18, 3, 33, 20, tzinfo=UTC))
    )
    metrics = FrontEndMetrics("one", expires_at=lambda: expires_at(HttpConfig(**http)))
    assert 'flotilla_tls_certificate_expiry_timestamp_seconds{front_end="one"} 2e+09' in metrics.render()
    without = FrontEndMetrics("one")
    assert 'flotilla_tls_certificate_expiry_timestamp_seconds{front_end="one"} 0.0' in without.render()


async def test_a_mark_before_the_text_is_passed_over(
    service: ApiService, authority: trustme.CA, tmp_path: Path, free_port: int
) -> None:
    """As editors of Windows write it: HTTPS was served, and gRPC said that it could not have its port."""
    http = written(tmp_path, authority.issue_cert("localhost"), codecs.BOM_UTF8)
    assert preflight.check(config(http, with_grpc=True)) == []
    credentials = ServedCertificate(HttpConfig(**http)).grpc_credentials()
    server = make_server(GrpcConfig(enabled=True, port=free_port), service, credentials=credentials)
    await server.start()
    trusting = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    async with grpc.aio.secure_channel(f"localhost:{free_port}", trusting) as channel:
        stub: Any = pb_grpc.GenerationStub(channel)
        answer = await stub.Generate(pb.GenerateRequest(prompt="hi", max_tokens=100))
        assert answer.choices[0].text == ANSWER
    await server.stop(None)


def test_what_only_the_library_of_grpc_cannot_use_is_told(authority: trustme.CA, tmp_path: Path) -> None:
    """It was told by the front end, as a port that it could not have."""
    http = written(tmp_path, authority.issue_cert("localhost"))
    chain = http["tls_certificate"]
    text = chain.read_text().replace(" CERTIFICATE-", " TRUSTED CERTIFICATE-")
    chain.write_text(text)
    assert preflight.check(config(http)) == []
    with pytest.raises(StartError, match="cannot be used by gRPC"):
        preflight.check(config(http, with_grpc=True))
