"""Real servers for the system tests: Ray, Serve, a cell with drafters of the demo family, HTTP."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from cluster.config import FlotillaConfig
from deployments.demo import demo_config
from tests.cluster.test_profile_file import profile_of
from zoo.registry import EAGLE


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    model: str
    config: FlotillaConfig

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.config.grpc.port}"

    def post(self, path: str, body: object, **options: object) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=120, **options)  # type: ignore[arg-type]

    def complete(self, prompt: str, **fields: object) -> dict:  # type: ignore[type-arg]
        body = {"model": self.model, "prompt": prompt, "temperature": 0, "max_tokens": 32, **fields}
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        return dict(response.json())


def small_demo(drafters: Collection[str] | None = None, **changes: object) -> FlotillaConfig:
    """The demo family on any free port; `drafters` are those to keep, `eagle` is added."""
    raw = demo_config().model_dump()
    raw["http"]["port"] = 0
    if drafters is not None:
        raw["drafters"] = [one for one in raw["drafters"] if one["name"] in drafters]
        if "eagle" in drafters:
            raw["drafters"].append({"kind": "eagle", "path": f"zoo:{EAGLE}"})
    for path, value in changes.items():
        section, _, field = path.partition("__")
        raw[section][field] = value
    return FlotillaConfig.model_validate(raw)


def with_profile(config: FlotillaConfig, path: Path) -> FlotillaConfig:
    """With costs in this file, for who tests nothing of them: measuring takes each cell two seconds."""
    profile_of(config).save(path)
    return config.model_copy(update={"profile": str(path)})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def start(config: FlotillaConfig) -> Iterator[Server]:
    """Serve `config` until the generator is closed; one server at a time, as Ray is one per machine."""
    from deployments.serving import running

    with running(config) as url:
        model = httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"]
        yield Server(url, model, config)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # AdaServe drafts in every step, also where a machine or poor drafters would make the default refrain:
    # these tests are about what speculation might change, so there must be some.
    tiers = {"strict": {"e2e_ms": 1.0, "downgrade_to": "bulk"}, "bulk": {"priority": 1}}
    changes = {f"tiers__{name}": tier for name, tier in tiers.items()}
    changes |= {"policy__name": "adaserve", "grpc__enabled": True, "grpc__port": free_port()}
    # The other models of the family would be more of the same, and each is a process to start; that any of
    # them drafts without a change of the text is shown in tests/cluster/test_local_engine.py.
    yield from start(small_demo(("general-2x192", "eagle", "prompt-lookup"), **changes))
