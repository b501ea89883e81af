"""Mutual TLS: who has no certificate of the clients' authority does not connect, over HTTPS and gRPC."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme
import typer
from openai import AsyncOpenAI
from pydantic import ValidationError

from cluster.config import FlotillaConfig
from cluster.grpc_config import GrpcConfig
from cluster.http_config import HttpConfig
from deployments import preflight
from deployments.api_service import ApiService
from deployments.batch_client import BatchOptions, BatchProgress, BatchStopped, send_batch
from deployments.batch_file import read_requests
from deployments.client_tls import client_context
from deployments.demo import demo_config
from deployments.exposure import exposure_warnings
from deployments.grpc_server import make_server
from deployments.grpc_start import await_certificate, await_grpc
from deployments.http_limits import server_config
from deployments.openai_api import create_app
from deployments.preflight import StartError
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from deployments.proto.flotilla.v1 import generation_pb2_grpc as pb_grpc
from deployments.served_certificate import ServedCertificate
from tests.deployments.socket_server import listening
from tests.fakes.tiny_tokenizer import ANSWER

SERVERS, CLIENTS, OTHERS = trustme.CA(), trustme.CA(), trustme.CA()


@pytest.fixture
def http_config(tmp_path: Path) -> HttpConfig:
    """Of a server that takes clients of the authority `CLIENTS`."""
    made = SERVERS.issue_cert("localhost")
    chain, key, authorities = tmp_path / "chain.pem", tmp_path / "key.pem", tmp_path / "clients.pem"
    made.cert_chain_pems[0].write_to_path(chain)
    made.private_key_pem.write_to_path(key)
    CLIENTS.cert_pem.write_to_path(authorities)
    return HttpConfig(tls_certificate=chain, tls_key=key, tls_client_ca=authorities)


def context_of(authority: trustme.CA | None) -> ssl.SSLContext:
    """A client's, with a certificate of that authority if there is one."""
    context = ssl.create_default_context()
    SERVERS.configure_trust(context)
    if authority is not None:
        authority.issue_cert("client@example.org").configure_cert(context)
    return context


def config(http: dict[str, Any], **sections: dict[str, Any]) -> FlotillaConfig:
    raw = demo_config().model_dump()
    raw["http"].update(http, port=0)
    for name, changes in sections.items():
        raw[name].update(changes)
    return FlotillaConfig.model_validate(raw)


async def test_https_asks_for_one(service: ApiService, http_config: HttpConfig) -> None:
    certificate = ServedCertificate(http_config)
    app = server_config(create_app(service), http_config, certificate.ssl_context)
    async with listening(app) as port:
        url = f"https://localhost:{port}"
        async with httpx.AsyncClient(verify=context_of(CLIENTS)) as client:
            assert (await client.get(f"{url}/health")).status_code == 200
            official = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=client)
            answer = await official.completions.create(model="demo", prompt="hi", max_tokens=100)
            assert answer.choices[0].text == ANSWER
        for authority in (None, OTHERS):
            async with httpx.AsyncClient(verify=context_of(authority)) as stranger:
                with pytest.raises(httpx.TransportError):
                    await stranger.get(f"{url}/health")
        # As `flotilla serve` waits for it, which has none.
        await asyncio.to_thread(await_certificate, f"localhost:{port}", "HTTPS", 10.0)
        OTHERS.cert_pem.write_to_path(str(http_config.tls_client_ca))
        certificate.look()
        certificate.look()
        async with httpx.AsyncClient(verify=context_of(OTHERS)) as client:
            assert (await client.get(f"{url}/health")).status_code == 200
        async with httpx.AsyncClient(verify=context_of(CLIENTS)) as stranger:
            with pytest.raises(httpx.TransportError):
                await stranger.get(f"{url}/health")


async def test_commands_show_the_certificate_of_the_environment(
    service: ApiService, http_config: HttpConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = CLIENTS.issue_cert("client@example.org")
    one_file, key, trusted = tmp_path / "client.pem", tmp_path / "client-key.pem", tmp_path / "trusted.pem"
    made.private_key_and_cert_chain_pem.write_to_path(one_file)
    made.private_key_pem.write_to_path(key)
    SERVERS.cert_pem.write_to_path(trusted)
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    batch = tmp_path / "batch.jsonl"
    body = {"model": "demo", "prompt": "hi", "max_tokens": 100}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    batch.write_text(json.dumps(line))
    certificate = ServedCertificate(http_config)
    app = server_config(create_app(service), http_config, certificate.ssl_context)

    async def sent(port: int) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        options = BatchOptions(url=f"https://localhost:{port}")
        await send_batch(read_requests(batch), lines.append, options, BatchProgress(1))
        return lines

    async with listening(app) as port:
        with pytest.raises(BatchStopped):
            await sent(port)
        monkeypatch.setenv("FLOTILLA_CLIENT_CERTIFICATE", str(one_file))
        assert [line["response"]["status_code"] for line in await sent(port)] == [200]
        made.cert_chain_pems[0].write_to_path(one_file)
        monkeypatch.setenv("FLOTILLA_CLIENT_KEY", str(key))
        assert [line["response"]["status_code"] for line in await sent(port)] == [200]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"FLOTILLA_CLIENT_KEY": "key.pem"}, "is set without FLOTILLA_CLIENT_CERTIFICATE"),
        ({"FLOTILLA_CLIENT_CERTIFICATE": "absent.pem"}, "absent.pem: cannot be used as a certificate"),
    ],
)
def test_a_certificate_of_ones_own_that_cannot_be_used_ends_a_command(
    names: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit):
        client_context(names)
    assert said in capsys.readouterr().err


async def test_so_does_grpc(service: ApiService, http_config: HttpConfig, free_port: int) -> None:
    credentials = ServedCertificate(http_config, for_grpc=True).grpc_credentials()
    server = make_server(GrpcConfig(enabled=True, port=free_port), service, credentials=credentials)
    await server.start()
    await asyncio.to_thread(await_grpc, f"127.0.0.1:{free_port}", 10.0, has_tls=True)

    async def text(authority: trustme.CA | None) -> str:
        own: tuple[bytes, bytes] | tuple[()] = ()
        if authority is not None:
            made = authority.issue_cert("client@example.org")
            own = (made.private_key_pem.bytes(), made.cert_chain_pems[0].bytes())
        trust = grpc.ssl_channel_credentials(SERVERS.cert_pem.bytes(), *own)
        async with grpc.aio.secure_channel(f"localhost:{free_port}", trust) as channel:
            stub: Any = pb_grpc.GenerationStub(channel)
            answer = await stub.Generate(pb.GenerateRequest(prompt="hi", max_tokens=100))
        return str(answer.choices[0].text)

    assert await text(CLIENTS) == ANSWER
    for authority in (None, OTHERS):
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await text(authority)
    await server.stop(None)


def test_what_cannot_be_used_is_told_before_a_start(http_config: HttpConfig, tmp_path: Path) -> None:
    http = http_config.model_dump(include={"tls_certificate", "tls_key", "tls_client_ca"})
    on = {"grpc": {"enabled": True, "port": 0}}
    assert preflight.check(config(http, **on)) == []
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    for wrong, said in (
        (tmp_path / "absent.pem", "there is no .*absent.pem"),
        (http["tls_key"], "http.tls_client_ca: .* holds no certificate in PEM"),
        (broken, f"http.tls_client_ca {broken} cannot be used"),
    ):
        with pytest.raises(StartError, match=said):
            preflight.check(config(http | {"tls_client_ca": wrong}, **on))
    with pytest.raises(ValidationError, match="tls_client_ca asks clients for certificates"):
        HttpConfig(tls_client_ca=http["tls_client_ca"])
    with pytest.raises(ValidationError, match="Ray Serve's proxy does not ask"):
        HttpConfig(**http, direct=False)


def test_who_asks_for_certificates_is_not_open_to_anybody(http_config: HttpConfig) -> None:
    http = http_config.model_dump(include={"tls_certificate", "tls_key", "tls_client_ca"})
    reached = {"host": "0.0.0.0"}
    assert exposure_warnings(config(http | reached), wants_keys=False) == []
    (warning,) = exposure_warnings(config(http | reached | {"tls_client_ca": None}), wants_keys=False)
    assert "ANYBODY" in warning
