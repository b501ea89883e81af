"""How reliably and how soon requests end that a gRPC client gives up (`flotilla bench grpc-cancel`).

Trials run one after the other, so what the cell still decodes is the trial's own request. A request is lost
if the cell still has it `GRACE_S` after the client let go; it is then ended by the `Cancel` method, and
whether that found it is recorded.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, Literal

import grpc

from benchmarks import environment, tables
from cluster.config import FlotillaConfig
from cluster.grpc_config import GrpcConfig
from deployments.names import APP_NAME
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from deployments.proto.flotilla.v1 import generation_pb2_grpc as pb_grpc

#: `direct`: front ends listen; `proxy`: Ray Serve's proxy, watched; `bare-proxy`: the same as Ray has it.
Mode = Literal["direct", "proxy", "bare-proxy"]
#: Ways to let go: cancelling right after a chunk or up to 50 ms later, a deadline that passes, closing the
#: channel, cancelling a whole (not streamed) answer, and the `Cancel` method.
WAYS = ("after a chunk", "within 50 ms", "deadline", "close", "whole answer", "Cancel")

GRACE_S = 2.0
_POLL_S = 0.002
_MAX_CHUNKS = 6
_PROMPT = "def read_lines(path):\n    "

#: How many requests the cell has.
CountRequests = Callable[[], Awaitable[int]]


@dataclass(frozen=True)
class Trial:
    """One request given up.

    Attributes:
        way: one of `WAYS`.
        freed_ms: from letting go until the cell had no request any more; None if it was lost.
        num_cancelled: choices that `Cancel` ended, where it was called: as the way, or after a loss.
        status: what the client's call ended with.
    """

    way: str
    freed_ms: float | None
    num_cancelled: int | None = None
    status: str = ""


def summarise(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Counts and times by way, in the order of `WAYS`."""
    rows = []
    for way in WAYS:
        mine = [trial for trial in trials if trial.way == way]
        freed = sorted(trial.freed_ms for trial in mine if trial.freed_ms is not None)
        lost = [trial for trial in mine if trial.freed_ms is None]
        rows.append(
            {
                "way": way,
                "trials": len(mine),
                "lost": len(lost),
                "lost_then_cancelled": sum(bool(trial.num_cancelled) for trial in lost),
                "freed_ms_p50": median(freed) if freed else None,
                "freed_ms_max": freed[-1] if freed else None,
            }
        )
    return rows


async def run_trials(
    address: str,
    count: CountRequests,
    num_trials: int,
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> list[Trial]:
    """So many trials against a running service, the ways in turn.

    Args:
        address: of the service.
        count: asks the cell; nobody else may be using it.
        num_trials: in all.
        seed: of the moments.
        tick: called after each.

    Raises:
        RuntimeError: if the cell is busy with something else.
    """
    chance = random.Random(seed)
    trials = []
    for number in range(num_trials):
        if await _until_idle(count, time.perf_counter(), 10.0) is None:
            raise RuntimeError("the cell serves other requests; cancellation is measured on an idle one")
        trials.append(
            await _trial(address, count, WAYS[number % len(WAYS)], chance, f"trial-{seed}-{number}")
        )
        tick()
    return trials


async def _trial(
    address: str, count: CountRequests, way: str, chance: random.Random, request_id: str
) -> Trial:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = pb_grpc.GenerationStub(channel)
        request = pb.GenerateRequest(
            prompt=_PROMPT, max_tokens=900, ignore_eos=True, request_id=request_id, seed=1
        )
        num_cancelled: int | None = None
        if way == "whole answer":
            call = stub.Generate(request)
            waiting = asyncio.ensure_future(call.code())
            while not await count() and not waiting.done():
                await asyncio.sleep(_POLL_S)
            await asyncio.sleep(chance.uniform(0.0, 0.1))
        else:
            timeout_s = chance.uniform(0.05, 0.4) if way == "deadline" else None
            call = stub.GenerateStream(request, timeout=timeout_s)
            await _read(call, None if way == "deadline" else chance.randint(1, _MAX_CHUNKS))
        if way == "within 50 ms":
            await asyncio.sleep(chance.uniform(0.0, 0.05))
        let_go_at = time.perf_counter()
        if way == "close":
            await channel.close()
        elif way == "Cancel":
            answer = await stub.Cancel(pb.CancelRequest(request_id=request_id))
            num_cancelled = answer.num_cancelled
            await _read(call, None)
        elif way != "deadline":
            call.cancel()
        freed_ms = await _until_idle(count, let_go_at, GRACE_S)
        status = (await call.code()).name
    if freed_ms is None:
        async with grpc.aio.insecure_channel(address) as channel:
            answer = await pb_grpc.GenerationStub(channel).Cancel(pb.CancelRequest(request_id=request_id))
            num_cancelled = answer.num_cancelled
    return Trial(way, freed_ms, num_cancelled, status)


async def _read(call: Any, most: int | None) -> None:
    """Read so many chunks, or to the end, however the call ends."""
    try:
        while most is None or most > 0:
            if await call.read() is grpc.aio.EOF:
                return
            most = None if most is None else most - 1
    except grpc.aio.AioRpcError:
        pass


async def _until_idle(count: CountRequests, since: float, within_s: float) -> float | None:
    """Milliseconds from `since` until the cell has no request; None if it takes too long."""
    while await count():
        if time.perf_counter() - since > within_s:
            return None
        await asyncio.sleep(_POLL_S)
    return 1e3 * (time.perf_counter() - since)


def run(config: FlotillaConfig, modes: Sequence[Mode], num_trials: int, seed: int) -> dict[str, Any]:
    """Serve the configuration in each mode and try; the record of all trials."""
    from deployments import grpc_proxy
    from deployments.serving import running

    results: dict[str, Any] = {}
    watched = list(grpc_proxy.SERVICER_FUNCTIONS)
    for mode in modes:
        if mode == "bare-proxy":
            bare = f"{pb_grpc.__name__}.add_GenerationServicer_to_server"
            grpc_proxy.SERVICER_FUNCTIONS[:] = [bare, *watched[1:]]
        try:
            served = _configured(config, mode)
            with running(served, tables.console), tables.progress() as bar:
                task = bar.add_task(mode, total=num_trials)
                trials = asyncio.run(
                    run_trials(
                        f"127.0.0.1:{served.grpc.port}",
                        cell_requests(),
                        num_trials,
                        seed,
                        tick=partial(bar.advance, task),
                    )
                )
        finally:
            grpc_proxy.SERVICER_FUNCTIONS[:] = watched
        rows = summarise(trials)
        results[mode] = {"ways": rows, "trials": [asdict(trial) for trial in trials]}
        tables.console.print(table(mode, rows))
    return {
        "benchmark": "grpc-cancel",
        "environment": environment.describe(),
        **environment.of_cell(config, __name__),
        "grace_s": GRACE_S,
        "seed": seed,
        "modes": results,
    }


def table(mode: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    """The figures of a mode for people."""
    columns = ["way", "trials", "lost", "then ended by Cancel", "freed p50, ms", "freed max, ms"]
    cells = [
        [
            str(row["way"]),
            str(row["trials"]),
            str(row["lost"]),
            str(row["lost_then_cancelled"]),
            tables.number(row["freed_ms_p50"]),
            tables.number(row["freed_ms_max"]),
        ]
        for row in rows
    ]
    return tables.plain_table(mode, columns, cells)


def cell_requests() -> CountRequests:
    """Asks the cell of the system that this process serves; in requests running and waiting."""
    from ray import serve

    from deployments.application import CELL_NAME

    handle = serve.get_deployment_handle(CELL_NAME, APP_NAME)

    async def count() -> int:
        load = await handle.load.remote()
        return int(load["running"] + load["waiting"])

    return count


def _configured(config: FlotillaConfig, mode: Mode) -> FlotillaConfig:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    is_direct = mode == "direct"
    served = GrpcConfig(enabled=True, direct=is_direct, host="127.0.0.1" if is_direct else "::", port=port)
    return config.model_copy(update={"grpc": served, "http": config.http.model_copy(update={"port": 0})})
