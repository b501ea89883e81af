"""Real servers for the system tests: Ray, Serve, a cell with drafters of the demo family, HTTP."""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import ray
from ray.cluster_utils import Cluster

from cluster.config import FlotillaConfig
from cluster.priority import use_ordinary_priority
from cluster.process_environment import take_on
from deployments.demo import demo_config
from tests.cluster.test_profile_file import profile_of
from tests.own_processes import own_processes
from zoo.registry import ADAPTER, EAGLE

#: Processes of a cell; when its server has stopped there must be none.
WORKERS = ("DrafterWorker", "VerifierWorker")


def headers_of(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


@dataclass(frozen=True)
class Server:
    """A running server, and the key that it is asked with."""

    url: str
    model: str
    config: FlotillaConfig
    key: str | None = None

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.config.grpc.port}"

    @property
    def headers(self) -> dict[str, str]:
        return headers_of(self.key)

    def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> httpx.Response:
        headers = self.headers | (headers or {})
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=120)

    def complete(self, prompt: str, **fields: object) -> dict:  # type: ignore[type-arg]
        body = {"model": self.model, "prompt": prompt, "temperature": 0, "max_tokens": 32, **fields}
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        return dict(response.json())


def small_demo(drafters: Collection[str | Mapping[str, object]], **changes: object) -> FlotillaConfig:
    """The demo family on any free port; `changes` are of `section__field`.

    `drafters` are names of the demo's to keep, to which `eagle` is added, or drafters as they are written.
    """
    raw = demo_config().model_dump()
    raw["http"]["port"] = 0
    known = {one["name"]: one for one in raw["drafters"]} | {
        "eagle": {"kind": "eagle", "path": f"zoo:{EAGLE}"}
    }
    raw["drafters"] = [known[one] if isinstance(one, str) else one for one in drafters]
    for path, value in changes.items():
        section, _, field = path.partition("__")
        raw[section][field] = value
    return FlotillaConfig.model_validate(raw)


def with_profile(config: FlotillaConfig, path: Path) -> FlotillaConfig:
    """With costs in this file, for who tests nothing of them: measuring takes each cell two seconds."""
    profile_of(config).save(path)
    return config.model_copy(update={"profile": str(path)})


def pass_self_tests(config: FlotillaConfig) -> None:
    """Have it on record that its models passed (docs/decisions/0058), for who tests nothing of how they load.

    Else each worker compares, for which it imports Transformers: most of its start, and done here already.
    Those of test_server.py do, and ranks.
    """
    from cluster.pool_drafter import build_pool_drafter
    from cluster.target import build_target

    limits = build_target(config.target).ready()
    for drafter in config.drafters:
        build_pool_drafter(drafter, limits.vocab_size, limits.max_tokens, config.target.path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that share a Ray come one after another, before those that start their own."""
    places = [place for place, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    found = [items[place] for place in places]
    found.sort(key=lambda item: "shared_ray" not in getattr(item, "fixturenames", ()))
    for place, item in zip(places, found, strict=True):
        items[place] = item


class SharedRay:
    """A Ray cluster for all modules that are not about its start."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None

    def address(self) -> str:
        """Where to join; started if there is none."""
        if self._cluster is None:
            take_on()
            use_ordinary_priority()
            self._cluster = Cluster()
            self._cluster.add_node(num_cpus=16, object_store_memory=200 << 20, include_dashboard=False)
        return str(self._cluster.address)

    def end(self) -> None:
        """Stop it: who has started a Ray of its own since could not join it again, and would hear nothing."""
        if self._cluster is not None:
            self._cluster.shutdown()
        self._cluster = None


@pytest.fixture(scope="package")
def ray_of_many() -> Iterator[SharedRay]:
    made = SharedRay()
    yield made
    made.end()


@pytest.fixture(scope="module")
def shared_ray(ray_of_many: SharedRay) -> Iterator[None]:
    """Who starts Ray in this module joins the cluster there is, and leaves no worker behind in it."""
    ray.shutdown()  # benchmarks leave theirs to the end of the process
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", ray_of_many.address())
        yield
    ray.shutdown()
    deadline = time.monotonic() + 20
    while left := {kind: found for kind in WORKERS if (found := own_processes(kind))}:
        assert time.monotonic() < deadline, f"workers are left of a server that was stopped: {left}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def own_ray(ray_of_many: SharedRay) -> None:
    """This module starts a Ray by itself, and there is no other one beside."""
    ray.shutdown()
    ray_of_many.end()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def start(config: FlotillaConfig, key: str | None = None) -> Iterator[Server]:
    """Serve `config` until the generator is closed; one server at a time, as Ray is one per machine."""
    from deployments.serving import running

    with running(config) as url:
        listed = httpx.get(f"{url}/v1/models", headers=headers_of(key), timeout=30).json()
        yield Server(url, listed["data"][0]["id"], config, key)


@pytest.fixture(scope="module")
def server(own_ray: None) -> Iterator[Server]:
    # AdaServe drafts in every step, also where a machine or poor drafters would make the default refrain:
    # these tests are about what speculation might change, so there must be some.
    tiers = {"strict": {"e2e_ms": 1.0, "downgrade_to": "bulk"}, "bulk": {"priority": 1}}
    changes = {f"tiers__{name}": tier for name, tier in tiers.items()}
    changes |= {"policy__name": "adaserve", "grpc__enabled": True, "grpc__port": free_port()}
    changes["target__adapters"] = [{"name": "terse", "path": f"zoo:{ADAPTER}"}]
    # The other models of the family would be more of the same, and each is a process to start; that any of
    # them drafts without a change of the text is shown in tests/cluster/test_local_engine.py.
    yield from start(small_demo(("general-2x192", "eagle", "prompt-lookup"), **changes))
