"""API keys and TLS of a real system: who is let in, and that no key and no text is kept anywhere."""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc
import httpx
import pytest
import ray
import trustme
from openai import AuthenticationError, OpenAI
from typer.testing import CliRunner

from deployments import cli
from deployments.api_keys import new_key
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from deployments.proto.flotilla.v1 import generation_pb2_grpc as pb_grpc
from tests.system.conftest import Server, free_port, headers_of

PROMPT = "def quokka_enclosure(capybara_visitors):\n    "


@dataclass(frozen=True)
class Secured:
    """An authority, keys of a file and of the environment, and where the system keeps its records.

    Attributes:
        changes: of a configuration that uses them, as `small_demo` takes them.
    """

    authority: trustme.CA
    authority_file: Path
    keys: dict[str, str]
    records: Path
    changes: dict[str, object]
    chain_file: Path
    key_file: Path

    def client(self, url: str, key: str | None) -> httpx.Client:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        headers = headers_of(None if key is None else self.keys[key])
        return httpx.Client(base_url=url, verify=context, headers=headers, timeout=60)


def secured_in(directory: Path) -> Secured:
    """Files of a secured system."""
    authority = trustme.CA()
    authority_file = directory / "authority.pem"
    authority.cert_pem.write_to_path(authority_file)
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    chain_file, key_file = directory / "chain.pem", directory / "key.pem"
    certificate.private_key_pem.write_to_path(key_file)
    certificate.cert_chain_pems[0].write_to_path(chain_file)
    made = CliRunner().invoke(cli.app, ["keys", "create", "team", "-f", str(directory / "keys.yaml")])
    records = directory / "records"
    records.mkdir()
    changes: dict[str, object] = {
        "http__tls_certificate": chain_file,
        "http__tls_key": key_file,
        "grpc__enabled": True,
        "grpc__port": free_port(),
        "security__keys_file": directory / "keys.yaml",
        "security__require_keys": True,
        "debug__decisions_file": records / "decisions.jsonl",
        "log__file": records / "log.jsonl",
        "log__format": "json",
        "log__level": "debug",
    }
    keys = {"team": made.stdout.splitlines()[-1], "environment": new_key()}
    return Secured(authority, authority_file, keys, records, changes, chain_file, key_file)


def check_renewal(server: Server, secured: Secured) -> None:
    """A renewed certificate is served without a restart, over HTTPS and gRPC, and its metric is its own."""
    ends = datetime(2037, 3, 1, tzinfo=UTC)
    renewed = secured.authority.issue_cert("127.0.0.1", "localhost", not_after=ends)
    renewed.private_key_pem.write_to_path(secured.key_file)
    renewed.cert_chain_pems[0].write_to_path(secured.chain_file)
    text = renewed.cert_chain_pems[0].bytes().decode()
    for address in (server.url.removeprefix("https://"), server.grpc_address):
        host, _, port = address.rpartition(":")
        deadline = time.monotonic() + 30.0
        while ssl.get_server_certificate((host, int(port))) != text:
            assert time.monotonic() < deadline, f"{address} goes on with the one before"
            time.sleep(0.2)
    with secured.client(server.url, "environment") as operator:
        lines = operator.get("/metrics").text.splitlines()
    (line,) = [one for one in lines if one.startswith("flotilla_tls_certificate_expiry_timestamp_seconds{")]
    assert float(line.split()[-1]) == ends.timestamp()


def check_keys_and_tls(server: Server, secured: Secured) -> None:
    """Who is let in, and that no key and no text is kept anywhere."""
    assert server.url.startswith("https://")
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "return_token_ids": True}
    with secured.client(server.url, None) as stranger:
        assert stranger.get("/ready").status_code == 200
        for path in ("/v1/models", "/metrics", "/debug/timeline", "/admin/drafters"):
            assert stranger.get(path).status_code == 401
        assert stranger.post("/v1/completions", json=body).status_code == 401
    with secured.client(server.url, "team") as team:
        whole = team.post("/v1/completions", json=body)
        assert whole.status_code == 200, whole.text
        choice = whole.json()["choices"][0]
        assert team.get("/metrics").status_code == 403
        bad = team.post("/v1/completions", json=body | {"temperature": "quokka"})
        assert bad.status_code == 400
        model = team.get("/v1/models").json()["data"][0]["id"]
    with secured.client(server.url, "environment") as operator:
        metrics = operator.get("/metrics").text
        timeline = operator.get("/debug/timeline").text
        assert "flotilla_requests_total" in metrics
    with secured.client(server.url, None) as trusting:
        base = f"{server.url}/v1"
        official = OpenAI(base_url=base, api_key=secured.keys["team"], http_client=trusting)
        again = official.completions.create(model=model, prompt=PROMPT, max_tokens=24, temperature=0)
        assert again.choices[0].text == choice["text"]
        with pytest.raises(AuthenticationError):
            OpenAI(base_url=base, api_key="none", http_client=trusting).models.list()
    trust = grpc.ssl_channel_credentials(secured.authority.cert_pem.bytes())
    with grpc.secure_channel(server.grpc_address, trust) as channel:
        stub = pb_grpc.GenerationStub(channel)
        request = pb.GenerateRequest(prompt=PROMPT, max_tokens=24, temperature=0)
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            stub.Generate(request)
        metadata = (("authorization", f"Bearer {secured.keys['team']}"),)
        assert stub.Generate(request, metadata=metadata).choices[0].text == choice["text"]

    records = {path.name: path.read_text() for path in secured.records.iterdir()}
    assert '"key":"team"' in records["log.jsonl"]
    assert records["decisions.jsonl"].count("\n") > 3
    logs = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs"
    for path in logs.rglob("*"):
        if path.is_file():
            records[str(path)] = path.read_text(errors="replace")
    records |= {"metrics": metrics, "timeline": timeline}
    ids = ",".join(map(str, whole.json()["choices"][0]["token_ids"][:6]))
    secrets = {
        "prompt": "quokka",
        "other prompt": "capybara",
        "answer": choice["text"].strip(),
        "tokens": ids,
    }
    secrets |= {f"key {name}": key for name, key in secured.keys.items()}
    for name, secret in secrets.items():
        assert len(secret) > 5
        found = [
            where for where, text in records.items() if secret in text or secret in text.replace(" ", "")
        ]
        assert not found, f"the {name} is in {found}"
