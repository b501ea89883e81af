"""A real system with API keys and TLS: who is let in, and that no key and no text is kept anywhere."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
import ray
import trustme
from openai import AuthenticationError, OpenAI

from cluster.config import FlotillaConfig
from deployments.api_keys import new_key
from deployments.demo import demo_config
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from deployments.proto.flotilla.v1 import generation_pb2_grpc as pb_grpc
from tests.system.conftest import free_port, pass_self_tests, with_profile

pytestmark = pytest.mark.system

PROMPT = "def quokka_enclosure(capybara_visitors):\n    "


@dataclass(frozen=True)
class Secured:
    """A running server, and what belongs to it."""

    url: str
    config: FlotillaConfig
    authority: trustme.CA
    keys: dict[str, str]
    records: Path

    def client(self, key: str | None) -> httpx.Client:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        headers = {} if key is None else {"Authorization": f"Bearer {self.keys[key]}"}
        return httpx.Client(base_url=self.url, verify=context, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def secured(shared_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    from typer.testing import CliRunner

    from deployments import cli
    from deployments.serving import running

    directory = tmp_path_factory.mktemp("secured")
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.private_key_pem.write_to_path(directory / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(directory / "chain.pem")
    made = CliRunner().invoke(cli.app, ["keys", "create", "team", "-f", str(directory / "keys.yaml")])
    keys = {"team": made.stdout.splitlines()[-1], "environment": new_key()}
    raw = demo_config().model_dump()
    raw["drafters"] = [one for one in raw["drafters"] if one["kind"] == "prompt_lookup"]
    raw["http"] |= {"port": 0, "tls_certificate": directory / "chain.pem", "tls_key": directory / "key.pem"}
    raw["grpc"] |= {"enabled": True, "port": free_port()}
    raw["security"] |= {"keys_file": directory / "keys.yaml", "require_keys": True}
    raw["debug"] |= {"decisions_file": directory / "records" / "decisions.jsonl", "timeline": 1000}
    raw["log"] |= {"file": directory / "records" / "log.jsonl", "format": "json", "level": "debug"}
    raw["pool"] |= {"standby": 0}  # a process in reserve would have none of it
    (directory / "records").mkdir()
    config = with_profile(FlotillaConfig.model_validate(raw), directory / "costs.json")
    pass_self_tests(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOTILLA_API_KEY", keys["environment"])
        with running(config) as url:
            yield Secured(url, config, authority, keys, directory / "records")


def test_keys_and_tls_work_and_nothing_secret_is_kept(secured: Secured) -> None:
    assert secured.url.startswith("https://")
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "return_token_ids": True}
    with secured.client(None) as stranger:
        assert stranger.get("/ready").status_code == 200
        for path in ("/v1/models", "/metrics", "/debug/timeline", "/admin/drafters"):
            assert stranger.get(path).status_code == 401
        assert stranger.post("/v1/completions", json=body).status_code == 401
    with secured.client("team") as team:
        whole = team.post("/v1/completions", json=body)
        assert whole.status_code == 200, whole.text
        choice = whole.json()["choices"][0]
        assert team.get("/metrics").status_code == 403
        bad = team.post("/v1/completions", json=body | {"temperature": "quokka"})
        assert bad.status_code == 400
        model = team.get("/v1/models").json()["data"][0]["id"]
    with secured.client("environment") as operator:
        metrics = operator.get("/metrics").text
        timeline = operator.get("/debug/timeline").text
        assert "flotilla_requests_total" in metrics
    with secured.client(None) as trusting:
        base = f"{secured.url}/v1"
        official = OpenAI(base_url=base, api_key=secured.keys["team"], http_client=trusting)
        again = official.completions.create(model=model, prompt=PROMPT, max_tokens=24, temperature=0)
        assert again.choices[0].text == choice["text"]
        with pytest.raises(AuthenticationError):
            OpenAI(base_url=base, api_key="none", http_client=trusting).models.list()
    trust = grpc.ssl_channel_credentials(secured.authority.cert_pem.bytes())
    with grpc.secure_channel(f"127.0.0.1:{secured.config.grpc.port}", trust) as channel:
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
