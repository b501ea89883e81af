"""The cell's shell: turns the scheduler's actions into messages, answers into events, losses into workers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import time
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.util import get_node_ip_address

from cluster.actors import DrafterWorker, VerifierWorker, spawn
from cluster.cell_metrics import CellMetrics
from cluster.client_server import ClientServer
from cluster.config import DrafterConfig, FlotillaConfig
from cluster.core import SchedulerCore
from cluster.cost_model import DEFAULT_PROFILE, CostModel, CostProfile
from cluster.events import (
    Cancelled,
    ClientLost,
    Draft,
    DraftDone,
    DrafterReady,
    Emit,
    Event,
    Reject,
    RequestArrived,
    Tick,
    VerifierReady,
    Verify,
    VerifyDone,
    WorkerLost,
)
from cluster.free_cores import settle_draft_ahead
from cluster.profile_file import load_profile
from cluster.profile_fit import fit_cost
from cluster.rank import Rank
from cluster.recorded_core import make_core, newest_decisions
from cluster.step_client import StepClient
from cluster.stream_messages import Cancel, ClientMessage, Submit, TokenBatch, TokenEvent
from cluster.succession import take_over
from drafters.messages import DraftResult
from engine.wire import Decoder, encode
from verifier.messages import VerifyResult

_log = logging.getLogger(__name__)

VERIFIER = "verifier"
TICK_S = 0.25
# Pause before a lost worker is made again; doubled up to the last while it keeps dying.
FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 10.0


class Cell:
    """One scheduler, one target over its ranks, one pool of drafters (a Ray Serve deployment).

    Construction returns at once; `describe` tells how far the start has come.
    """

    def __init__(self, config: FlotillaConfig) -> None:
        self.config = settle_draft_ahead(config, os.cpu_count() or 1)
        self._token = secrets.token_hex(16).encode()
        self._stage = "starting"
        self._failure = ""
        self._metrics = CellMetrics()
        self._submits: dict[str, Submit] = {}
        self._clients = ClientServer(self._token, self._on_client_message, self._on_client_lost)
        self._address: tuple[str, int] = ("", 0)
        self._actors: dict[str, list[Any]] = {}
        self._steps: dict[str, list[StepClient]] = {}
        self._digests: dict[int, int] = {}
        self._draft_results: Decoder[DraftResult] = Decoder(DraftResult)
        self._verify_results: Decoder[VerifyResult] = Decoder(VerifyResult)
        self._scheduler_s = 0.0
        self._iteration_s = 0.0
        self._last_verify_at: float | None = None
        self._verifier_info = VerifierReady(0, 0, 0)
        self._restarts: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._core: SchedulerCore
        self._cores: dict[str, SchedulerCore] = {}
        self._use_profile(DEFAULT_PROFILE)
        self._task(self._start())

    # What Serve and the front ends call

    async def endpoint(self) -> tuple[str, int, str]:
        """Address and secret of the front ends' port; waits until it is open."""
        while not self._address[1]:
            await asyncio.sleep(0.02)
        return self._address[0], self._address[1], self._token.decode()

    async def describe(self) -> dict[str, Any]:
        """Model, limits, drafters, policy and how far the start has come."""
        return {
            "model": self.served_name,
            "max_tokens": self._core.max_model_tokens,
            "vocab_size": self._verifier_info.vocab_size,
            "drafters": sorted(self._core.pool.drafters),
            "drafters_configured": [drafter.name for drafter in self.config.drafters],
            "policy": self.config.policy.name,
            "stage": self._stage,
            "failure": self._failure,
            "ready": self._stage == "ready" and self._core.verifier is not None,
            "profile": msgspec.to_builtins(self._core.cost.profile),
        }

    async def metrics(self) -> str:
        """Prometheus exposition text of this cell."""
        return self._metrics.render(self._core)

    async def decisions(self, limit: int) -> bytes | None:
        """The newest steps as JSON lines (docs/decisions-log.md); None while none are kept."""
        return newest_decisions(self._core, limit)

    async def stats(self) -> dict[str, float]:
        """Processor seconds spent scheduling and seconds of whole iterations, for the scheduler's share."""
        return {
            "scheduler_s": self._scheduler_s,
            "iteration_s": self._iteration_s,
            "steps": self._core.totals.steps,
            "iterations": self._core.totals.iterations,
            "step_s": self._core.totals.step_s,
            "step_draft_s": self._core.totals.step_draft_s,
            "step_verify_s": self._core.totals.step_verify_s,
            "forward_s": self._core.totals.forward_s,
            "draft_forward_s": self._core.totals.draft_forward_s,
            "drafted": self._core.totals.drafted_tokens,
            "verified": self._core.totals.verified_tokens,
            "accepted": self._core.totals.accepted_tokens,
            "committed": self._core.totals.committed_tokens,
            "preemptions": self._core.totals.preemptions,
            "switches": self._core.pool.num_switches,
        }

    async def set_policy(self, policy: dict[str, Any], scheduler: dict[str, Any] | None = None) -> None:
        """Change fields of the policy and the scheduler between requests (to compare on one warm cell).

        Settings used before go on with what they had learnt of costs and drafters.

        Raises:
            ValueError: for a policy or a field that does not exist.
            RuntimeError: while a request is being served, or the target is not there.
        """
        raw = self.config.model_dump()
        raw["policy"] |= policy
        raw["scheduler"] |= scheduler or {}
        config = FlotillaConfig.model_validate(raw)
        before = self._core
        while before.is_idle and before.pool.is_waiting:
            await asyncio.sleep(0.01)  # a drafter is being scored on a request that has ended
        key = config.model_dump_json()
        core = self._cores.get(key) or make_core(config, CostModel(before.cost.profile))
        take_over(core, before, time.monotonic())
        self._cores |= {self.config.model_dump_json(): before, key: core}
        self.config, self._core = config, core

    async def check_health(self) -> None:
        """Raise if the cell cannot recover by itself."""
        if self._failure:
            raise RuntimeError(self._failure)

    @property
    def served_name(self) -> str:
        """Model id in the API."""
        target = self.config.target
        return target.served_name or Path(target.path.removeprefix("zoo:")).name

    # Start

    async def _start(self) -> None:
        try:
            self._address = await self._clients.start(get_node_ip_address())
            self._stage = "loading the target"
            ready = await self._load_verifier()
            self._stage = "loading drafters"
            loaded = await asyncio.gather(*(self._load_drafter(d, ready) for d in self.config.drafters))
            self._stage = "measuring costs"
            self._use_profile(await self._profile())
            self._handle(ready)
            for drafter in loaded:
                self._handle(drafter)
            _settle()
            self._stage = "ready"
            self._task(self._tick())
        except Exception as error:
            _log.exception("the cell could not start")
            self._failure = f"the cell could not start while {self._stage}: {error}"

    def _use_profile(self, profile: CostProfile) -> None:
        self._core = make_core(self.config, CostModel(profile))

    async def _load_verifier(self) -> VerifierReady:
        target = self.config.target
        actors = [
            spawn(VerifierWorker, num_cpus=target.placement.num_cpus, num_gpus=target.placement.num_gpus)
            for _ in range(target.tensor_parallel)
        ]
        self._actors[VERIFIER] = actors
        host, port = await actors[0].rendezvous.remote()
        ranks = [Rank(rank, len(actors), host, port) for rank in range(len(actors))]
        loaded = await asyncio.gather(
            *(a.load.remote(target, rank, self._token) for a, rank in zip(actors, ranks, strict=True))
        )
        lost = self._once(lambda: self._on_worker_lost(VERIFIER))
        self._steps[VERIFIER] = [
            await StepClient.connect(
                f"{VERIFIER} rank {rank}",
                tuple(address),
                self._token,
                self._on_verified if rank == 0 else self._on_rank_verified,
                lost,
            )
            for rank, (address, _) in enumerate(loaded)
        ]
        self._verifier_info = loaded[0][1]
        return self._verifier_info

    async def _load_drafter(self, config: DrafterConfig, ready: VerifierReady) -> DrafterReady:
        actor = spawn(DrafterWorker, num_cpus=config.placement.num_cpus, num_gpus=config.placement.num_gpus)
        self._actors[config.name] = [actor]
        address, capabilities = await actor.load.remote(
            config, ready.vocab_size, ready.max_tokens, self._token
        )
        client = await StepClient.connect(
            config.name,
            tuple(address),
            self._token,
            lambda data: self._on_drafted(config.name, data),
            self._once(lambda: self._on_worker_lost(config.name)),
        )
        self._steps[config.name] = [client]
        return DrafterReady(config.name, capabilities, config.max_requests)

    async def _profile(self) -> CostProfile:
        if self.config.profile is not None:
            profile, warnings = await asyncio.to_thread(load_profile, Path(self.config.profile), self.config)
            for warning in warnings:
                _log.warning("%s", warning)
            return profile
        points = await asyncio.gather(*(actor.profile.remote() for actor in self._actors[VERIFIER]))
        drafters = {}
        for config in self.config.drafters:  # one after the other: measured beside nobody else
            drafters[config.name] = fit_cost(await self._actors[config.name][0].profile.remote())
        return CostProfile(
            target=fit_cost(points[0]), drafters=drafters, overhead_s=DEFAULT_PROFILE.overhead_s
        )

    # Events and actions

    def _handle(self, event: Event) -> None:
        # Processor time of this thread: waiting for a core that others hold is not the scheduler's work.
        begun = time.thread_time()
        actions = self._core.handle(event, time.monotonic())
        self._scheduler_s += time.thread_time() - begun
        for action in actions:
            match action:
                case Draft(name, call):
                    self._steps[name][0].send(encode(call))
                case Verify(call):
                    data = encode(call)
                    for rank in self._steps[VERIFIER]:
                        rank.send(data)
                case Emit(client, events):
                    self._clients.send(client, TokenBatch(events))
                    for ended in events:
                        if ended.finish_reason is not None:
                            self._account(ended)
                case Reject(client, rejection):
                    if rejection.code != "duplicate_id":  # else it is the id of a request being served
                        self._submits.pop(rejection.request_id, None)
                    self._metrics.rejected(rejection.code)
                    self._clients.send(client, rejection)
        begun = time.thread_time()
        self._core.reflect()
        self._scheduler_s += time.thread_time() - begun

    def _account(self, event: TokenEvent) -> None:
        submit = self._submits.pop(event.request_id, None)
        if submit is not None and event.receipt is not None and event.finish_reason is not None:
            self._metrics.finished(event.finish_reason, submit.tier, submit.objective, event.receipt)

    def _on_client_message(self, client: str, message: ClientMessage) -> None:
        match message:
            case Submit():
                if message.request_id not in self._submits:
                    self._submits[message.request_id] = message
                self._handle(RequestArrived(message, client))
            case Cancel(request_id):
                self._handle(Cancelled(request_id))

    def _on_client_lost(self, client: str) -> None:
        self._handle(ClientLost(client))

    def _on_drafted(self, name: str, data: bytes) -> None:
        result = self._draft_results.decode(data)
        self._metrics.phase("draft", result.seconds)
        self._handle(DraftDone(name, result))

    def _on_verified(self, data: bytes) -> None:
        result = self._verify_results.decode(data)
        self._check_digest(result)
        now = time.monotonic()
        if self._last_verify_at is not None:
            self._iteration_s += now - self._last_verify_at
        self._metrics.phase("verify", result.seconds)
        self._handle(VerifyDone(result))
        self._last_verify_at = None if self._core.is_idle else now

    def _on_rank_verified(self, data: bytes) -> None:
        self._check_digest(self._verify_results.decode(data))

    def _check_digest(self, result: VerifyResult) -> None:
        """Every rank must have decided the same; the ranks after rank 0 only send their checksum."""
        if len(self._steps[VERIFIER]) == 1:
            return
        other = self._digests.setdefault(result.call_id, result.digest)
        if other != result.digest:
            _log.error("ranks disagree on call %d; rebuilding the target", result.call_id)
            for actor in self._actors[VERIFIER]:
                ray.kill(actor)
        self._digests.pop(result.call_id - 64, None)

    # Losses

    def _on_worker_lost(self, name: str) -> None:
        self._handle(WorkerLost(name))
        self._task(self._replace(name))

    async def _replace(self, name: str) -> None:
        pause = FIRST_PAUSE_S
        while True:
            self._restarts[name] = self._restarts.get(name, 0) + 1
            for client in self._steps.pop(name, []):
                await client.close()
            for actor in self._actors.pop(name, []):
                ray.kill(actor)
            try:
                if name == VERIFIER:
                    self._handle(await self._load_verifier())
                else:
                    config = next(d for d in self.config.drafters if d.name == name)
                    self._handle(await self._load_drafter(config, self._verifier_info))
            except Exception:
                _log.exception("%s could not be restarted; trying again in %.1f s", name, pause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LAST_PAUSE_S)
            else:
                return

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for drift in self._core.cost.take_drifts():
                _log.warning("%s", drift)
            if not self._core.is_idle:
                self._handle(Tick())

    def _task(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    def _once(callback: Any) -> Any:
        """Ranks fall together: the first loss reported is the only one acted on."""
        done = False

        def call() -> None:
            nonlocal done
            if not done:
                done = True
                callback()

        return call

    def __del__(self) -> None:
        for actors in getattr(self, "_actors", {}).values():
            for actor in actors:
                with contextlib.suppress(Exception):
                    ray.kill(actor)


def _settle() -> None:
    """What lives now lives on: the garbage collector need not walk it again in the middle of a step."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
