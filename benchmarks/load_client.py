"""Streaming client for any OpenAI-compatible server.

One process and one event loop send all requests and read all streams, over connections that are kept and
reused. On one machine the client takes processor time from the server it measures, so its own share is
part of every result: `LoadResult.client_cpu_share`, and how late it sent what was due (`Outcome.lag_ms`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from aiohttp.http import HttpProcessingError

from benchmarks.http_client import HttpClient, error_text, event_data
from benchmarks.workload import BenchRequest


@dataclass(slots=True)
class Outcome:
    """What happened to one request; times in milliseconds since it was sent.

    Attributes:
        request: what was sent.
        sent_s: when, in seconds from the start of the run.
        lag_ms: how much later than due (0 in a closed loop).
        ttft_ms: until the first piece of text or of a tool call; None if there was none.
        e2e_ms: until the last choice arrived (the usage that follows is not waited for).
        chunk_ms: when each piece of text arrived.
        text: the answer.
        token_ids: its tokens, from servers that return them.
        num_prompt_tokens, num_output_tokens: from the usage chunk.
        finish_reason: as the server gave it.
        metrics: the server's own account of the request.
        error: what went wrong; empty when nothing did.
        retry_after_s: when to come back, if the server said so.
        status: HTTP status; 0 without an answer.
        parse_s: time the client itself spent on reading this stream.
    """

    request: BenchRequest
    sent_s: float = 0.0
    lag_ms: float = 0.0
    ttft_ms: float | None = None
    e2e_ms: float | None = None
    chunk_ms: list[float] = field(default_factory=list)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None
    metrics: dict[str, Any] | None = None
    error: str = ""
    status: int = 0
    retry_after_s: float | None = None
    parse_s: float = 0.0

    @property
    def is_ok(self) -> bool:
        """Whether the whole answer arrived."""
        return not self.error

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per output token after the first; None below two tokens."""
        if self.ttft_ms is None or self.e2e_ms is None or self.num_output_tokens < 2:
            return None
        return (self.e2e_ms - self.ttft_ms) / (self.num_output_tokens - 1)


@dataclass(slots=True)
class LoadResult:
    """A run's outcomes, in request order.

    Attributes:
        outcomes: one per request.
        duration_s: from the start to the last answer.
        client_cpu_share: processor time of this process over wall time (1 is a whole core).
    """

    outcomes: list[Outcome]
    duration_s: float
    client_cpu_share: float


class LoadClient(HttpClient):
    """Sends requests to one server; use as an async context manager.

    Args:
        url: base address, with or without `/v1`.
        model: model id in the requests.
        sampling: body fields for every request (temperature, seed, ...).
        send_slo: whether objectives are sent as `slo`; servers that refuse unknown fields need False.
        api_key: sent as a bearer token.
        timeout_s: longest silence on a stream before the request counts as failed.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        sampling: Mapping[str, Any] | None = None,
        send_slo: bool = True,
        api_key: str | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        super().__init__(
            url,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=timeout_s),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            # Servers on uvicorn close idle connections after 5 s, which a client that waits between runs
            # finds out when it sends.
            keepalive_s=3.0,
        )
        self.model = model
        self._sampling = dict(sampling or {"temperature": 0.0})
        self._send_slo = send_slo

    def body(self, request: BenchRequest, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The JSON body sent for a request."""
        body: dict[str, Any] = {
            "model": self.model,
            **request.content(),
            "max_tokens": request.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._sampling,
        }
        asked = request.slo
        slo = {"tpot_ms": asked.tpot_ms, "ttft_ms": asked.ttft_ms, "e2e_ms": asked.e2e_ms}
        slo = {name: value for name, value in slo.items() if value is not None}
        if self._send_slo and slo:
            body["slo"] = slo
        body.update(extra or {})
        return body

    async def send(
        self,
        request: BenchRequest,
        origin: float | None = None,
        extra: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Outcome:
        """Send one request and read its stream to the end; never raises for what the server does.

        `origin` is the run's start on the performance counter; `extra` overrides body fields, and `headers`
        those of the client, such as the API key.
        """
        outcome = Outcome(request)
        path = "/v1/chat/completions" if request.is_chat else "/v1/completions"
        payload = msgspec.json.encode(self.body(request, extra))
        start = time.perf_counter()
        if origin is not None:
            outcome.sent_s = start - origin
            if request.arrival_s is not None:
                outcome.lag_ms = max(0.0, outcome.sent_s - request.arrival_s) * 1000.0
        try:
            async with self.session.post(
                self.url + path,
                data=payload,
                headers={"Content-Type": "application/json", **(headers or {})},
            ) as response:
                outcome.status = response.status
                after = response.headers.get("Retry-After", "")
                outcome.retry_after_s = float(after) if after.isdecimal() else None
                if response.status != 200:
                    outcome.error = f"HTTP {response.status}: {error_text(await response.read())}"
                    return outcome
                await self._read_stream(response, outcome, start)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        except (HttpProcessingError, ValueError, AttributeError, KeyError, TypeError) as error:
            # No JSON, no object, or a line that is too long.
            outcome.error = f"unreadable stream: {error}"[:300]
        return outcome

    async def _read_stream(self, response: aiohttp.ClientResponse, outcome: Outcome, start: float) -> None:
        pieces: list[str] = []
        done = False
        async for line in response.content:
            arrived = time.perf_counter()
            data = event_data(line)
            if data == b"[DONE]":
                done = True
            elif data is not None:
                _take_chunk(msgspec.json.decode(data), outcome, pieces, (arrived - start) * 1000.0)
            outcome.parse_s += time.perf_counter() - arrived
        outcome.text = "".join(pieces)
        if outcome.error:
            return
        if not done or outcome.e2e_ms is None:
            outcome.error = "the stream ended early"
        elif outcome.num_output_tokens == 0 and pieces:
            outcome.error = "no usage chunk: the server ignores stream_options.include_usage"
        elif outcome.ttft_ms is None:
            # Tokens without text (only an end token): the first sign of life is the end.
            outcome.ttft_ms = outcome.e2e_ms


# Of a chat's delta; thoughts have had both names (vLLM's is `reasoning` now).
_TEXTS = ("content", "reasoning", "reasoning_content")


def _take_chunk(chunk: Any, outcome: Outcome, pieces: list[str], now_ms: float) -> None:
    """Add one server-sent event to the outcome."""
    error = chunk.get("error")
    if error:
        outcome.error = str(error.get("message", error) if isinstance(error, dict) else error)
        return
    if chunk.get("usage"):
        outcome.num_prompt_tokens = int(chunk["usage"].get("prompt_tokens") or 0)
        outcome.num_output_tokens = int(chunk["usage"].get("completion_tokens") or 0)
    metrics = chunk.get("metrics")
    if metrics and isinstance(metrics, dict):
        outcome.metrics = metrics
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        text = choice.get("text") or next((delta[name] for name in _TEXTS if delta.get(name)), "")
        outcome.token_ids += choice.get("token_ids") or ()
        if text or delta.get("tool_calls"):
            pieces.append(text)
            outcome.chunk_ms.append(now_ms)
            if outcome.ttft_ms is None:
                outcome.ttft_ms = now_ms
        if choice.get("finish_reason"):
            outcome.finish_reason = choice["finish_reason"]
        outcome.e2e_ms = now_ms


async def run_load(
    client: LoadClient,
    requests: Sequence[BenchRequest],
    *,
    max_concurrency: int | None = None,
    extra: Mapping[str, Any] | Callable[[BenchRequest], Mapping[str, Any]] | None = None,
    on_done: Callable[[Outcome], None] | None = None,
) -> LoadResult:
    """Send all requests when they are due, at most `max_concurrency` at once.

    Requests without an arrival time are sent as soon as the bound admits them: a closed loop. Latency
    counts from sending; what waited for the bound shows in `lag_ms`. `extra` overrides body fields, the
    same of all requests or, given a function, of each its own.
    """

    async def send(request: BenchRequest, origin: float) -> Outcome:
        return await client.send(request, origin, extra(request) if callable(extra) else extra)

    return await send_when_due(requests, send, max_concurrency=max_concurrency, on_done=on_done)


async def send_when_due(
    requests: Sequence[BenchRequest],
    send: Callable[[BenchRequest, float], Awaitable[Outcome]],
    *,
    max_concurrency: int | None = None,
    on_done: Callable[[Outcome], None] | None = None,
) -> LoadResult:
    """As `run_load`, by any way to send a request.

    Args:
        requests: those without an arrival time are due at once.
        send: given a request and the run's start on the performance counter.
        max_concurrency: most requests at once; any number if None.
        on_done: called with each outcome.
    """
    bound = asyncio.Semaphore(max_concurrency or max(1, len(requests)))
    origin, cpu_origin = time.perf_counter(), time.process_time()

    async def one(request: BenchRequest) -> Outcome:
        if request.arrival_s is not None:
            await asyncio.sleep(max(0.0, origin + request.arrival_s - time.perf_counter()))
        async with bound:
            outcome = await send(request, origin)
        if on_done is not None:
            on_done(outcome)
        return outcome

    outcomes = await asyncio.gather(*(one(request) for request in requests))
    duration = time.perf_counter() - origin
    cpu = time.process_time() - cpu_origin
    return LoadResult(list(outcomes), duration, cpu / duration if duration > 0 else 0.0)
