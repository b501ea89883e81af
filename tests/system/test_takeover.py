"""Workers without their cell, in real processes: taken over once, or ended by themselves."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray.exceptions import RayActorError

from cluster.actors import DrafterWorker
from cluster.drafter_config import PromptLookupConfig
from cluster.log_files import log_directory
from cluster.observability_config import LogConfig
from cluster.process_environment import worker_environment
from cluster.spawning import end, spawn
from cluster.step_client import StepClient
from cluster.takeover import Takeover
from deployments.demo import demo_config
from drafters.messages import DraftCall, DraftItem, DraftPlan, DraftResult
from engine.sampling_params import RequestSpec, SamplingParams
from engine.wire import Decoder, encode

pytestmark = pytest.mark.system

ORPHAN_S = 2.0
TOKENS = [5, 6, 7, 8, 5, 6, 7]


@pytest.fixture(scope="module")
def cluster(shared_ray: None) -> None:
    ray.init(log_to_driver=False)


class Scheduler:
    """A cell's end of a drafter: connects, and asks for a draft."""

    def __init__(self, worker: Any, token: bytes) -> None:
        self._worker, self._token = worker, token
        self.answers: list[bytes] = []
        self.is_lost = False

    async def connect(self) -> None:
        process = {"cell": self._token.decode(), "worker": "lookup"}
        log = LogConfig(format="json")
        address = await self._worker.open.remote(self._token, 0.2, log, process)
        self._client = await StepClient.connect(
            "drafter", tuple(address), self._token, self.answers.append, self._lost
        )

    async def draft(self, spec: RequestSpec | None) -> DraftResult:
        start, new = (0, []) if spec is not None else (len(TOKENS), [8])
        item = DraftItem(
            request_id="r", start=start, tokens=np.array(new, np.int32), plan=DraftPlan(1), spec=spec
        )
        before = len(self.answers)
        self._client.send(encode(DraftCall(call_id=1, items=[item])))
        await until(lambda: len(self.answers) > before)
        return Decoder(DraftResult).decode(self.answers[-1])

    async def die(self) -> None:
        await self._client.close()

    def _lost(self) -> None:
        self.is_lost = True


async def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.02)


async def until_it_waits(worker: Any) -> None:
    while not await worker.waits.remote():
        await asyncio.sleep(0.02)


def takeover_of(system: str) -> Takeover:
    health = demo_config().health.model_copy(update={"orphan_s": ORPHAN_S})
    return Takeover(system, demo_config().model_copy(update={"health": health}))


async def loaded(system: str = "test") -> tuple[Any, int, Scheduler]:
    """A prompt lookup that outlives its cell: its actor, its process id, and the cell."""
    takeover = takeover_of(system)
    worker = spawn(DrafterWorker, {"num_cpus": 0, **takeover.options("lookup")}, takeover.orphan_s)
    scheduler = Scheduler(worker, b"first")
    await scheduler.connect()
    await worker.load.remote(PromptLookupConfig(kind="prompt_lookup", name="lookup"), 50, 64, "")
    _, pid = await worker.where.remote()
    return worker, pid, scheduler


def spec() -> RequestSpec:
    sampling = SamplingParams(temperature=0.0, max_tokens=9)
    return RequestSpec(request_id="r", tokens=TOKENS, prompt_len=len(TOKENS), sampling=sampling)


@pytest.mark.usefixtures("cluster")
async def test_a_worker_that_reserves_no_gpu_sees_none_and_takes_one_process_to_start() -> None:
    class Observed(DrafterWorker):
        def environment(self) -> dict[str, str]:
            assert "torch" not in sys.modules, "too late: torch has read it"
            return dict(os.environ)

        def runtime_environment(self) -> str:
            return ray.get_runtime_context().get_runtime_env_string()

    worker = spawn(Observed, {"num_cpus": 0})
    assert worker_environment(0).items() <= (await worker.environment.remote()).items()
    assert await worker.runtime_environment.remote() == "{}", (
        "Ray makes a process for it that makes the worker"
    )
    end(worker)


@pytest.mark.usefixtures("cluster")
async def test_a_worker_is_taken_over_by_one_only_and_has_forgotten_what_the_other_asked() -> None:
    worker, pid, first = await loaded()
    drafted = await first.draft(spec())
    assert drafted.drafts[0].tree.token.tolist() == [7, 8]
    await worker.keep.remote("what is known")
    assert await worker.take_over.remote() is None, "its cell lives"
    await first.die()
    await until_it_waits(worker)
    claims = [worker.take_over.remote() for _ in range(3)]
    capabilities, record = await claims[0]
    assert (capabilities.kind, record) == ("prompt_lookup", "what is known")
    assert [await claim for claim in claims[1:]] == [None, None]

    second = Scheduler(worker, b"second")
    await second.connect()
    assert (await second.draft(None)).unknown == ["r"]
    again = await second.draft(spec())
    assert again.drafts[0].tree.token.tolist() == [7, 8]
    assert psutil.pid_exists(pid)
    await second.die()
    await until(lambda: not psutil.pid_exists(pid))
    told = {name: lines(name) for name in ("first", "second")}
    assert [line["message"].partition(",")[0] for line in told["first"]][:1] == ["loaded"]
    assert told["second"][-1]["message"].startswith("its cell is gone")
    assert all(line["cell"] == name and line["worker"] == "lookup" for name in told for line in told[name])


def lines(cell: str) -> list[dict[str, Any]]:
    """What its worker has logged for this cell."""
    directory = log_directory()
    assert directory is not None
    text = (directory / f"cell-{cell}-worker-lookup.log").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.usefixtures("cluster")
async def test_only_those_that_wait_are_found_and_nobody_else_is_disturbed() -> None:
    """Another cell's, being loaded, answers nobody: it is left alone."""
    takeover = takeover_of("found")
    busy = spawn(DrafterWorker, {"num_cpus": 0, **takeover.options("lookup")}, takeover.orphan_s)
    _, pid = await busy.where.remote()
    importing = busy.import_models.remote()
    worker, _, first = await loaded("found")
    assert await takeover.waiting("lookup") == []
    await worker.keep.remote()
    assert await takeover.waiting("lookup") == [], "its cell is there"
    await first.die()
    await until_it_waits(worker)
    assert await takeover.waiting("lookup") == [worker]
    assert await takeover_of("other").waiting("lookup") == []
    await importing
    assert psutil.pid_exists(pid)


@pytest.mark.usefixtures("cluster")
async def test_a_worker_that_nobody_takes_over_ends() -> None:
    worker, pid, first = await loaded()
    await worker.keep.remote()
    await first.die()
    await asyncio.sleep(ORPHAN_S / 2)
    assert psutil.pid_exists(pid), "it was to wait"
    await until(lambda: not psutil.pid_exists(pid))
    with pytest.raises(RayActorError):
        await worker.take_over.remote()
