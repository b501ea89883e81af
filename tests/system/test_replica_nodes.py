"""On a Ray cluster whose head has no CPUs, as the chart's, cells and front ends run on the workers alone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray._private.state import actors
from ray._raylet import GcsClient
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.cluster_utils import Cluster

from deployments.application import WORKER_ENVIRONMENT, build_app
from deployments.names import APP_NAME
from tests.system.conftest import small_demo

pytestmark = pytest.mark.system

NODE: dict[str, Any] = {"object_store_memory": 100 << 20, "include_dashboard": False}
#: As the chart's `workerGroups` have them.
OF_GROUP = {"flotilla-cell": 1, "flotilla-front-end": 1}
#: One more than fit on the worker, whose other CPU is the target's.
FRONT_ENDS = 3


@pytest.fixture
def address() -> Iterator[str]:
    root = str(Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    os.environ.update(WORKER_ENVIRONMENT)
    cluster = Cluster()
    cluster.add_node(num_cpus=0, labels={"machine": "head"}, **NODE)
    cluster.add_node(num_cpus=2, labels={"machine": "worker"}, resources=OF_GROUP, **NODE)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield str(cluster.address)
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


def replicas() -> dict[str, list[tuple[str, str]]]:
    """State and machine of every replica, by deployment."""
    machines = {node["NodeID"]: node["Labels"].get("machine", "") for node in ray.nodes()}
    found: dict[str, list[tuple[str, str]]] = {}
    for actor in actors().values():
        kind, _, name = actor["ActorClassName"].partition(f":{APP_NAME}:")
        if kind == "ServeReplica" and actor["State"] != "DEAD":
            state = (actor["State"], machines.get(actor["Address"]["NodeID"], ""))
            found.setdefault(name, []).append(state)
    return found


def asked_for(address: str) -> list[dict[str, float]]:
    """What the autoscaler is told that nodes are missing for."""
    state = get_cluster_resource_state(GcsClient(address=address))
    return [dict(one.request.resources_bundle) for one in state.pending_resource_requests]


def test_replicas_keep_off_the_head_and_those_that_do_not_fit_ask_for_a_node(address: str) -> None:
    config = small_demo(
        (),
        scaling__cells={"placement": {"resources": {"flotilla-cell": 0.001}}},
        scaling__front_ends={"placement": {"num_cpus": 1, "resources": {"flotilla-front-end": 0.001}}},
        http__front_ends=FRONT_ENDS,
        http__direct=False,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": 0}, proxy_location="Disabled")
    serve.api._run(build_app(config), _blocking=False, name=APP_NAME, route_prefix="/")
    deadline = time.monotonic() + 60
    while True:
        found, missing = replicas(), asked_for(address)
        placed = {name: [where for state, where in each if state == "ALIVE"] for name, each in found.items()}
        if missing and {"Cell", "Directory", "FrontEnd"} <= {name for name, each in placed.items() if each}:
            break
        assert time.monotonic() < deadline, (found, missing)
        time.sleep(0.3)
    assert {where for each in placed.values() for where in each} == {"worker"}
    assert {"CPU": 1.0, "flotilla-front-end": 0.001} in missing
