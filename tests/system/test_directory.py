"""The directory answers everybody else while one who reports to it is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.members import Member
from deployments.directory import Directory, DirectoryClient, ask

NUM_STOPPED = 4


@ray.remote(num_cpus=0)
class Reporter:
    """Reports again as soon as it is answered, so that it is likely to be stopped in the midst of a call."""

    async def start(self, directory: DeploymentHandle, member: Member) -> int:
        self._client = DirectoryClient(directory, lambda: member, interval_s=0.0)
        self._client.start()
        return os.getpid()

    async def num_heard(self) -> int:
        return len(self._client.members)


@pytest.fixture
def directory() -> Iterator[DeploymentHandle]:
    ray.shutdown()  # benchmarks leave theirs to the end of the process
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    serve.start(proxy_location="Disabled")
    deployed = serve.deployment(Directory).options(
        max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0}
    )
    yield serve.run(deployed.bind(), name="directory", route_prefix=None)
    serve.shutdown()
    ray.shutdown()


def test_who_is_stopped_in_the_midst_of_a_report_keeps_nobody_waiting(directory: DeploymentHandle) -> None:
    stopped = []
    for number in range(NUM_STOPPED):
        reporter = Reporter.remote()
        member = Member(kind="cell", id=f"{number}", node="n")
        pid = ray.get(reporter.start.remote(directory, member))
        while not ray.get(reporter.num_heard.remote()):
            pass
        os.kill(pid, signal.SIGSTOP)
        stopped.append(reporter)
        for _ in range(5):
            assert asyncio.run(ask(directory, "members"))
    for reporter in stopped:
        ray.kill(reporter)
