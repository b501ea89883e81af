"""The directory of a system: it answers while one who reports is stopped, and frees what is abandoned."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.util import get_placement_group, placement_group

from cluster.members import Member
from cluster.takeover import group_prefix
from deployments.directory import Directory, DirectoryClient, ask

pytestmark = pytest.mark.system

NUM_STOPPED, NUM_REPORTS = 2, 4


@ray.remote(num_cpus=0)
class Reporter:
    """Reports again as soon as it is answered, so that it is likely to be stopped in the midst of calls."""

    async def start(self, directory: DeploymentHandle, members: list[Member]) -> int:
        self._clients = [DirectoryClient(directory, lambda told=one: told, interval_s=0.0) for one in members]
        for client in self._clients:
            client.start()
        return os.getpid()

    async def num_heard(self) -> int:
        return min(len(client.members) for client in self._clients)


@pytest.fixture(scope="module")
def directory(shared_ray: None) -> Iterator[DeploymentHandle]:
    # Names of groups are those of a namespace: Ray Serve's, in which cells and directory are.
    ray.init(log_to_driver=False, namespace="serve")
    serve.start(proxy_location="Disabled")
    deployed = serve.deployment(Directory).options(
        max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0}
    )
    yield serve.run(deployed.bind(free_after_s=2.0), name="directory", route_prefix=None)
    serve.shutdown()


def test_who_is_stopped_in_the_midst_of_a_report_keeps_nobody_waiting(directory: DeploymentHandle) -> None:
    reporters = [Reporter.remote() for _ in range(NUM_STOPPED)]
    for number, reporter in enumerate(reporters):
        members = [Member(kind="cell", id=f"{number} {report}", node="n") for report in range(NUM_REPORTS)]
        pid = ray.get(reporter.start.remote(directory, members))
        while not ray.get(reporter.num_heard.remote()):
            pass
        os.kill(pid, signal.SIGSTOP)
        for _ in range(5):
            assert asyncio.run(ask(directory, "members"))
    for reporter in reporters:
        ray.kill(reporter)


def test_what_a_cell_reserved_is_freed_when_no_cell_names_it_any_more(directory: DeploymentHandle) -> None:
    names = {lineage: f"{group_prefix('directory')}{lineage}:1" for lineage in ("named", "abandoned")}

    @ray.remote(num_cpus=0)
    def reserve(name: str) -> None:
        placement_group([{"CPU": 0.01}], name=name, lifetime="detached").wait(10)

    def exists(lineage: str) -> bool:
        try:
            get_placement_group(names[lineage])
        except ValueError:
            return False
        return True

    ray.get([reserve.remote(name) for name in names.values()])
    member = Member(kind="cell", id="1", node="n", details={"lineage": "named"})
    deadline = time.monotonic() + 30
    while exists("abandoned"):
        assert time.monotonic() < deadline, "nobody freed it"
        asyncio.run(ask(directory, "report", member))
        assert exists("named")
        time.sleep(0.1)
