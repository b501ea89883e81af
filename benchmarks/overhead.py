"""What the way to the client costs (`flotilla bench overhead`): HTTP and gRPC beside the token stream.

One served system answers the same prompts three ways in turn. The cell's token stream is the engine alone:
tokens as the scheduler commits them, on the connection that front ends use. HTTP and gRPC add the front end:
checks, text, server-sent events or protobuf messages, one more process on the way. All clients are this one
process, which shares the machine; what its parsing takes counts against HTTP and gRPC.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc
from ray import serve

from benchmarks import demo, environment, tables
from benchmarks import prompts as prompt_sources
from benchmarks.engine import Deck, Orders
from benchmarks.engine_under_test import Task
from benchmarks.load_client import LoadClient
from benchmarks.local_engine import submission, with_concurrency
from benchmarks.prompts import Prompt
from benchmarks.transformers_engine import Reference
from benchmarks.workload import BenchRequest
from cluster.config import FlotillaConfig
from deployments.cell_client import CellClient
from deployments.names import APP_NAME
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from deployments.proto.flotilla.v1 import generation_pb2_grpc as pb_grpc

STREAM, HTTP, GRPC = "token stream", "HTTP", "gRPC"
CELL_NAME = "Cell"


@dataclass(frozen=True, slots=True)
class Timing:
    """One answer as its client saw it: milliseconds to the first and the last of it, and its tokens."""

    ttft_ms: float
    e2e_ms: float
    num_tokens: int


#: Sends one task, and returns when the answer is complete.
Ask = Callable[[Task], Awaitable[Timing]]


@dataclass(slots=True)
class Figures:
    """One way at one concurrency, a value per round.

    Attributes:
        way: `STREAM`, `HTTP` or `GRPC`.
        concurrency: requests at once.
        ttft_ms: median time to the first token.
        tpot_ms: time per token after the first, over all tokens of the round.
        tokens_per_s: of all requests together.
        num_tokens: generated in all rounds.
    """

    way: str
    concurrency: int
    ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, timings: Sequence[Timing], seconds: float) -> None:
        """Take in a round.

        Raises:
            ValueError: if no answer has two tokens.
        """
        later = sum(timing.num_tokens - 1 for timing in timings if timing.num_tokens > 1)
        if not later:
            raise ValueError("no answer has two tokens; time per token cannot be told")
        decoding_ms = sum(timing.e2e_ms - timing.ttft_ms for timing in timings if timing.num_tokens > 1)
        tokens = sum(timing.num_tokens for timing in timings)
        self.ttft_ms.append(statistics.median(timing.ttft_ms for timing in timings))
        self.tpot_ms.append(decoding_ms / later)
        self.tokens_per_s.append(tokens / seconds)
        self.num_tokens += tokens


def summary(figures: Sequence[Figures]) -> list[dict[str, Any]]:
    """Medians over rounds, and what each way adds to the token stream at the same concurrency.

    `tpot_ratio` is the median over rounds of the ratio within a round, with its extremes.
    """
    streams = {one.concurrency: one for one in figures if one.way == STREAM}
    rows = []
    for one in figures:
        base = streams[one.concurrency]
        ratios = [own / other for own, other in zip(one.tpot_ms, base.tpot_ms, strict=True)]
        rows.append(
            asdict(one)
            | {
                "median_ttft_ms": statistics.median(one.ttft_ms),
                "median_tpot_ms": statistics.median(one.tpot_ms),
                "median_tokens_per_s": statistics.median(one.tokens_per_s),
                "added_ttft_ms": statistics.median(one.ttft_ms) - statistics.median(base.ttft_ms),
                "added_tpot_ms": statistics.median(one.tpot_ms) - statistics.median(base.tpot_ms),
                "tpot_ratio": {
                    "median": statistics.median(ratios),
                    "min": min(ratios),
                    "max": max(ratios),
                },
                "same_tokens": one.num_tokens == base.num_tokens,
            }
        )
    return rows


async def _over_stream(client: CellClient, end_tokens: Sequence[int], task: Task) -> Timing:
    start = time.perf_counter()
    first = last = 0.0
    tokens = 0
    async for event in client.submit(submission(task, end_tokens)):
        if event.tokens:
            last = time.perf_counter()
            first = first or last
            tokens += len(event.tokens)
    return Timing(1e3 * (first - start), 1e3 * (last - start), tokens)


async def _over_http(client: LoadClient, task: Task) -> Timing:
    prompt = Prompt(task.domain, token_ids=tuple(task.tokens))
    outcome = await client.send(BenchRequest(index=0, prompt=prompt, max_tokens=task.max_tokens))
    if not outcome.is_ok or outcome.ttft_ms is None or outcome.e2e_ms is None:
        raise RuntimeError(f"HTTP: {outcome.error or 'an answer without an end'}")
    return Timing(outcome.ttft_ms, outcome.e2e_ms, outcome.num_output_tokens)


async def _over_grpc(stub: Any, task: Task) -> Timing:
    request = pb.GenerateRequest(
        prompt_token_ids=task.tokens, max_tokens=task.max_tokens, temperature=0.0, add_special_tokens=False
    )
    start = time.perf_counter()
    first = last = 0.0
    tokens = 0
    async for chunk in stub.GenerateStream(request):
        last = time.perf_counter()
        first = first or last
        if chunk.HasField("usage"):
            tokens = chunk.usage.completion_tokens
    return Timing(1e3 * (first - start), 1e3 * (last - start), tokens)


async def ask_all(ask: Ask, tasks: Sequence[Task], concurrency: int) -> tuple[list[Timing], float]:
    """Timings of all tasks in a closed loop of `concurrency`, and the seconds it took."""
    bound = asyncio.Semaphore(concurrency)

    async def one(task: Task) -> Timing:
        async with bound:
            return await ask(task)

    start = time.perf_counter()
    timings = await asyncio.gather(*map(one, tasks))
    return list(timings), time.perf_counter() - start


async def _ways(
    config: FlotillaConfig, url: str, end_tokens: Sequence[int], stack: AsyncExitStack
) -> dict[str, Ask]:
    handle = serve.get_deployment_handle(CELL_NAME, APP_NAME)

    async def locate() -> tuple[str, int, str]:
        host, port, token = await handle.endpoint.remote()
        return host, port, token

    stream = CellClient(locate)
    stack.push_async_callback(stream.close)
    model = config.target.served_name or demo.directory(config.target.path).rpartition("/")[2]
    http = await stack.enter_async_context(LoadClient(url, model, sampling={"temperature": 0.0}))
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{config.grpc.port}"))
    stub = pb_grpc.GenerationStub(channel)
    return {
        STREAM: lambda task: _over_stream(stream, end_tokens, task),
        HTTP: lambda task: _over_http(http, task),
        GRPC: lambda task: _over_grpc(stub, task),
    }


async def measure(
    ways: dict[str, Ask], deck: Deck, concurrencies: Sequence[int], per_run: int, rounds: int
) -> AsyncIterator[Figures]:
    """Figures by concurrency and way; the ways take turns, in another order each round."""
    orders = Orders()
    for concurrency in concurrencies:
        count = max(per_run, concurrency)
        figures = {way: Figures(way, concurrency) for way in ways}
        for ask in ways.values():
            await ask_all(ask, deck.warm_ups(concurrency), concurrency)
        for _ in range(rounds):
            tasks = [
                task for domain in deck.domains for task in deck.deal(domain, -(-count // len(deck.domains)))
            ]
            for way in orders.draw(list(ways)):
                timings, seconds = await ask_all(ways[way], tasks, concurrency)
                figures[way].add(timings, seconds)
        for one in figures.values():
            yield one


def served(config: FlotillaConfig, concurrency: int, grpc_port: int) -> FlotillaConfig:
    """The configuration with room for all requests, gRPC on, and nothing kept of one request for another.

    Else who asks second would find the prompt computed, by the target or by drafters.
    """
    roomy = with_concurrency(demo.keeping_nothing(config), max(concurrency, config.scheduler.max_running))
    return roomy.model_copy(
        update={
            "http": roomy.http.model_copy(update={"port": 0}),
            "grpc": roomy.grpc.model_copy(update={"enabled": True, "direct": True, "port": grpc_port}),
        }
    )


def run(
    config: FlotillaConfig,
    *,
    source: str,
    concurrencies: Sequence[int],
    per_run: int,
    rounds: int,
    max_tokens: int | None,
    seed: int,
) -> dict[str, Any]:
    """Serve the configuration, measure, print the table and return the record."""
    from benchmarks.server_process import free_port
    from deployments.serving import running

    reference = Reference(demo.directory(config.target.path), config.target.dtype, config.target.quantization)
    loaded = prompt_sources.load(source)
    encoded = [reference.encode(prompt) for prompt in loaded]
    deck = Deck(loaded, encoded, bound=max_tokens, seed=seed)
    config = served(config, max(concurrencies), free_port())

    async def collect(url: str) -> list[Figures]:
        async with AsyncExitStack() as stack:
            ways = await _ways(config, url, reference.end_tokens, stack)
            found = measure(ways, deck, sorted(set(concurrencies)), per_run, rounds)
            return [figures async for figures in found]

    with running(config, tables.console) as url:
        figures = asyncio.run(collect(url))
    rows = summary(figures)
    _print(rows)
    return {
        "benchmark": "overhead",
        "environment": environment.describe(),
        **environment.of_cell(config, __name__),
        "prompts": source,
        "per_run": per_run,
        "max_tokens": max_tokens,
        "rounds": rounds,
        "seed": seed,
        "ways": rows,
    }


def _print(rows: Sequence[dict[str, Any]]) -> None:
    heads = ["requests at once", "way", "TTFT ms", "added", "TPOT ms", "added", "ratio", "tokens/s"]
    tables.console.print(
        tables.plain_table(
            "What the way to the client costs, medians over rounds",
            heads,
            [
                [
                    str(row["concurrency"]),
                    row["way"],
                    tables.number(row["median_ttft_ms"]),
                    tables.number(row["added_ttft_ms"]),
                    tables.number(row["median_tpot_ms"], 2),
                    tables.number(row["added_tpot_ms"], 2),
                    tables.number(row["tpot_ratio"]["median"], 2, "x"),
                    tables.number(row["median_tokens_per_s"], 0),
                ]
                for row in rows
            ],
        )
    )
