"""On a Ray cluster whose head has no CPUs, as the chart's, cells and front ends run on the workers alone."""

from __future__ import annotations

import time

import ray
from ray import serve
from ray._private.state import actors
from ray._raylet import GcsClient
from ray.autoscaler.v2.sdk import get_cluster_resource_state

from deployments.application import build_app
from deployments.names import APP_NAME
from tests.system.conftest import small_demo

#: As the chart's `workerGroups` have them.
OF_GROUP = {"flotilla-cell": 1.0, "flotilla-front-end": 1.0}
#: One more than fit on that node, which has one CPU.
FRONT_ENDS = 2


def _replicas() -> dict[str, list[tuple[str, str]]]:
    """State and machine of every replica, by deployment."""
    machines = {node["NodeID"]: node["Labels"].get("machine", "") for node in ray.nodes()}
    found: dict[str, list[tuple[str, str]]] = {}
    for actor in actors().values():
        kind, _, name = actor["ActorClassName"].partition(f":{APP_NAME}:")
        if kind == "ServeReplica" and actor["State"] != "DEAD":
            state = (actor["State"], machines.get(actor["Address"]["NodeID"], ""))
            found.setdefault(name, []).append(state)
    return found


def _asked_for(address: str) -> list[dict[str, float]]:
    """What the autoscaler is told that nodes are missing for."""
    state = get_cluster_resource_state(GcsClient(address=address))
    return [dict(one.request.resources_bundle) for one in state.pending_resource_requests]


def check_replicas(address: str) -> None:
    """Where they are, and what is asked for; of the nodes only "worker" has `OF_GROUP`, and one CPU."""
    config = small_demo(
        (),
        scaling__cells={"placement": {"resources": {"flotilla-cell": 0.001}}},
        scaling__front_ends={"placement": {"num_cpus": 1, "resources": {"flotilla-front-end": 0.001}}},
        http__front_ends=FRONT_ENDS,
        http__direct=False,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": 0}, proxy_location="Disabled")
    try:
        serve.api._run(build_app(config), _blocking=False, name=APP_NAME, route_prefix="/")
        _await_replicas(address)
    finally:
        serve.shutdown()


def _await_replicas(address: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        found, missing = _replicas(), _asked_for(address)
        placed = {name: [where for state, where in each if state == "ALIVE"] for name, each in found.items()}
        if missing and {"Cell", "Directory", "FrontEnd"} <= {name for name, each in placed.items() if each}:
            break
        assert time.monotonic() < deadline, (found, missing)
        time.sleep(0.3)
    assert {where for each in placed.values() for where in each} == {"worker"}
    assert {"CPU": 1.0, "flotilla-front-end": 0.001} in missing
