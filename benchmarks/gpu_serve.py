"""The parts of calls of `scripts/gpu_session.sh` that serve: what a server does on a machine with one GPU.

    python -m benchmarks.gpu_serve config > serve.yaml
    python -m benchmarks.gpu_serve ready URL PID
    python -m benchmarks.gpu_serve load URL --json load.json

The server is `flotilla serve`, started by the script; each part but `ray` asks that one (docs/gpu.md).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from benchmarks import tables
from benchmarks.demo import keeping_nothing
from benchmarks.environment import describe
from benchmarks.live_system import LiveSystem
from benchmarks.served_load import differences, load, show
from cluster.config import FlotillaConfig

if TYPE_CHECKING:  # with these comes torch, which takes the other parts seconds
    from benchmarks.live_client import Choice, Delivery, LiveClient
    from benchmarks.live_comparison import Comparison
    from benchmarks.live_requests import LiveRequest

# By name, because it ships no types.
psutil: Any = importlib.import_module("psutil")

#: Of a served system, beside the drafters.
_HEADS = "zoo:heads-3x384"
_DRAFTERS = {"general": "zoo:drafter-general-2x192", "code": "zoo:drafter-code-2x128"}
_TARGET = "zoo:target-8x384"
# A target that was killed loads again before its requests are answered.
_GIVE_UP_S = 60.0


def served(
    device: str,
    num_gpus: float,
    target: str | None = None,
    drafters: Mapping[str, str] | None = None,
    num_slots: int | str = "auto",
    eagle: str | None = None,
) -> FlotillaConfig:
    """A target and drafters on shares of one device: `num_gpus`, and for each drafter a fifth of that.

    They are the demo family, or a checkpoint in bfloat16 with others as its drafters, by name, and an EAGLE
    layer. Without GPUs and for the device `auto` it is for commands that run in one process.
    """
    where: dict[str, Any] = {"device": device, "num_slots": num_slots, "memory_fraction": 0.85}
    beside = {"num_gpus": num_gpus / 5, "collocate": "target"}
    paths: Mapping[str, str] = _DRAFTERS
    beside_target = [{"kind": "heads", "path": _HEADS}]
    if target is not None:
        where, paths = where | {"dtype": "bfloat16"}, dict(drafters or {})
        beside_target = [] if eagle is None else [{"kind": "eagle", "path": eagle}]
    models = [
        {"kind": "model", "name": name, "path": path, **where, "placement": beside}
        for name, path in paths.items()
    ]
    verifier = {"path": target or _TARGET, "heads": None if target else _HEADS, **where}
    return FlotillaConfig.model_validate(
        {
            "target": verifier | {"placement": {"num_gpus": num_gpus}},
            "drafters": [*models, *beside_target, {"kind": "prompt_lookup"}],
            "http": {"admin": True},
        }
    )


def look_at_ray() -> int:
    """Start Ray as the server does, and say what it has, and what a task with half a GPU sees.

    Returns:
        1 if such a task sees none; 3 if Ray has none.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray

    started = time.monotonic()
    ray.init(include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
    resources = ray.cluster_resources()
    print(f"Ray {ray.__version__} after {time.monotonic() - started:.1f} s: {resources}")
    print(f"node {ray.util.get_node_ip_address()}, {os.cpu_count()} cores, /dev/shm ", end="")
    print(f"{psutil.disk_usage('/dev/shm').free >> 20} MiB free, ", end="")
    print(f"memory {psutil.virtual_memory().available >> 20} MiB")
    status = 3
    if resources.get("GPU"):
        name, visible = ray.get(ray.remote(num_gpus=0.5)(_seen).remote(), timeout=30)
        print(f"a task with half a GPU: CUDA_VISIBLE_DEVICES={visible}, {name or 'no device for torch'}")
        status = 0 if name else 1
    ray.shutdown()
    return status


def _seen() -> tuple[str, str | None]:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return name and f"{name}, {torch.ones(2, device='cuda').sum().item()}", os.environ.get(
        "CUDA_VISIBLE_DEVICES"
    )


async def await_ready(url: str, pid: int) -> None:
    """Until it serves; raises RuntimeError if its process ends before."""
    started = time.monotonic()
    async with aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/ready", timeout=aiohttp.ClientTimeout(total=2)) as answer:
                    if answer.status == 200:
                        break
            if not _is_alive(pid):
                raise RuntimeError(f"the server (process {pid}) has ended")
            await asyncio.sleep(0.3)
        print(f"ready {time.monotonic() - started:.1f} s after this began to look")
        system = LiveSystem(url, pid, served("cpu", 0.0))
        for one in await system.drafters(session):
            print("drafter", {name: one.get(name) for name in ("worker", "state", "pid")})
        for role, processes in sorted(system.processes().items()):
            print(f"{role}: {len(processes)} processes, {[process.pid for process in processes]}")


async def _ask_all(
    ask: Callable[[LiveRequest], Awaitable[Delivery]], requests: Sequence[LiveRequest], compared: Comparison
) -> float:
    """Ask all at once and compare each; the seconds until the last answer."""
    started = time.monotonic()
    for delivery in await asyncio.gather(*map(ask, requests)):
        compared.add(delivery)
    return time.monotonic() - started


async def _alone(client: LiveClient, requests: Sequence[LiveRequest]) -> Mapping[int, Mapping[int, Choice]]:
    """What each request gets alone, by its index."""
    references = {}
    for request in requests:
        delivery = await client.ask(request, f"alone-{request.index}-{time.monotonic_ns()}")
        if not delivery.is_answered:
            raise RuntimeError(f"request {request.index} ({request.mode}) failed: {delivery.last.error}")
        references[request.index] = delivery.last.choices
    return references


def _judge(compared: Comparison, references: Mapping[int, Mapping[int, Choice]]) -> int:
    """Say what differs; 1 if something does beyond a near tie. Where all are the same nothing is loaded."""
    from benchmarks.live_ties import explain_differences

    print({name: count for name, count in compared.counts.items() if count})
    for one in compared.lost:
        print("lost:", one.request.mode, one.last.status, one.last.error)
    ties = explain_differences(_TARGET, compared.differences, references)
    for tie in ties:
        print("differs:", tie)
    return int(bool(compared.lost) or any(not tie["proven"] for tie in ties))


async def ask_in_every_way(url: str, count: int) -> int:
    """Requests of every kind, streamed and whole: alone, then all at once, twice."""
    from benchmarks.live_client import LiveClient
    from benchmarks.live_comparison import Comparison
    from benchmarks.live_requests import mixed_requests

    requests = mixed_requests(count, 0, 48)
    async with LiveClient(url, give_up_s=_GIVE_UP_S) as client:
        references = await _alone(client, requests)
        compared = Comparison(references)
        for turn in ("first", "second"):

            def ask(one: LiveRequest, turn: str = turn) -> Awaitable[Delivery]:
                return client.ask(one, f"{turn}-{one.index}")

            seconds = await _ask_all(ask, requests, compared)
            print(f"{len(requests)} at once: {seconds:.2f} s")
    return _judge(compared, references)


async def kill_the_target(url: str, pid: int) -> int:
    """End the target's process while it answers; every answer must be that of the undisturbed system."""
    from benchmarks.live_client import LiveClient
    from benchmarks.live_comparison import Comparison
    from benchmarks.live_requests import mixed_requests

    system = LiveSystem(url, pid, served("cpu", 0.0))
    requests = [one for one in mixed_requests(56, 1, 96) if one.mode in ("greedy", "sampled", "JSON schema")]
    arrived = asyncio.Event()
    async with (
        LiveClient(url, give_up_s=_GIVE_UP_S, on_tokens=lambda at, tokens: arrived.set()) as client,
        aiohttp.ClientSession() as session,
    ):
        references = await _alone(client, requests)
        compared = Comparison(references)
        arrived.clear()
        asked = asyncio.create_task(
            _ask_all(lambda one: client.ask(one, f"killed-{one.index}"), requests, compared)
        )
        await arrived.wait()
        before = system.pids("verifier")
        for victim in before:
            os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        while True:
            scrape = await system.scrape(session)
            if system.pids("verifier") - before and scrape is not None and scrape.total("flotilla_ready"):
                break
            await asyncio.sleep(0.1)
        print(f"killed {before}, with {len(requests)} requests; served again after ", end="")
        print(f"{time.monotonic() - killed:.1f} s")
        await asked
        print(f"all answered {time.monotonic() - killed:.1f} s after the kill")
    return _judge(compared, references)


def stop(url: str, pid: int, metrics: Path | None) -> int:
    """SIGTERM, once its metrics are kept; 1 if processes are left. Says how much of a GPU is in use then."""
    if metrics is not None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            metrics.write_bytes(answer.read())
    processes = LiveSystem(url, pid, served("cpu", 0.0)).processes()
    started = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    while _is_alive(pid) and time.monotonic() - started < 40:
        time.sleep(0.1)
    print(f"the server ended {time.monotonic() - started:.1f} s after SIGTERM")
    left = {}
    for _ in range(30):
        left = {role: [one.pid for one in of if _is_alive(one.pid)] for role, of in processes.items()}
        left = {role: pids for role, pids in left.items() if pids}
        if not left:
            break
        time.sleep(0.1)
    print("left:", left or "nobody", "of", {role: len(of) for role, of in processes.items()})
    with contextlib.suppress(OSError):
        asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
        print("GPU memory in use:", subprocess.run(asked, capture_output=True, text=True).stdout.strip())
    return int(bool(left))


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def _load(asked: argparse.Namespace) -> None:
    names = [name for name in asked.drafters.split(",") if name]
    loops, where = [], describe()
    figures = load(
        asked.url, asked.way, names, asked.seconds, asked.concurrency, asked.max_tokens, asked.learn
    )
    async for one in figures:
        show(one)
        loops.append(asdict(one))
        tables.write_json(asked.json, {"benchmark": "gpu-serve", "environment": where, "loops": loops})


async def _differ(asked: argparse.Namespace) -> None:
    found = await differences(asked.url, asked.count, asked.concurrency, asked.max_tokens)
    print(f"answers that differ from plain ones, one at a time: {found}")
    record = {"benchmark": "gpu-serve-differences", "environment": describe(), **found}
    tables.write_json(asked.json, record)


def _named(text: str) -> tuple[str, str]:
    """A drafter's name, `small` unless it is given, and its path."""
    name, _, path = text.rpartition("=")
    return name or "small", path


def main(arguments: Sequence[str]) -> int:
    """Run one part; its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    parser_of_config = parts.add_parser("config")
    parser_of_config.add_argument("--device", default="cuda")
    parser_of_config.add_argument("--num-gpus", type=float, default=0.5)
    parser_of_config.add_argument("--target", default=None)
    parser_of_config.add_argument(
        "--drafter", action="append", default=[], type=_named, metavar="[NAME=]PATH", help="beside `--target`"
    )
    parser_of_config.add_argument("--eagle", default=None, help="beside `--target`")
    parser_of_config.add_argument("--num-slots", default="auto")
    parser_of_config.add_argument(
        "--keep-nothing", action="store_true", help="no request's prefix for others"
    )
    parts.add_parser("ray")
    for name in ("ready", "ask", "kill", "load", "differ", "stop"):
        part = parts.add_parser(name)
        part.add_argument("url")
        part.add_argument("pid", type=int)
        if name == "stop":
            part.add_argument("--metrics", type=Path, default=None)
        if name == "load":
            part.add_argument("--way", required=True)
            part.add_argument("--drafters", default="")
            part.add_argument("--seconds", type=float, default=3.0)
            part.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
            part.add_argument("--learn", type=float, default=0.0, help="seconds before each with drafts")
            part.add_argument("--max-tokens", type=int, default=96)
            part.add_argument("--json", type=Path, default=None)
        if name == "differ":
            part.add_argument("--count", type=int, default=48)
            part.add_argument("--concurrency", type=int, default=16)
            part.add_argument("--max-tokens", type=int, default=96)
            part.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args(arguments)
    match asked.part:
        case "config":
            slots = asked.num_slots if asked.num_slots == "auto" else int(asked.num_slots)
            config = served(
                asked.device, asked.num_gpus, asked.target, dict(asked.drafter), slots, asked.eagle
            )
            config = keeping_nothing(config) if asked.keep_nothing else config
            print(config.model_dump_json(indent=1))  # JSON is YAML
        case "ray":
            return look_at_ray()
        case "ready":
            asyncio.run(await_ready(asked.url, asked.pid))
        case "ask":
            return asyncio.run(ask_in_every_way(asked.url, 14))
        case "kill":
            return asyncio.run(kill_the_target(asked.url, asked.pid))
        case "load":
            asyncio.run(_load(asked))
        case "differ":
            asyncio.run(_differ(asked))
        case "stop":
            return stop(asked.url, asked.pid, asked.metrics)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # the part's time is over, and what it has found is to be seen
        sys.exit("interrupted")
