"""A client that loses nothing it was told it may ask for again: retries as told, and counts what happened."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import aiohttp
import msgspec

from benchmarks.http_client import HttpClient, event_data
from benchmarks.live_requests import LiveRequest

#: How an attempt ended: `answered`; `refused` (429 or 503 with Retry-After: ask again then); `broken` (the
#: connection ended without an answer, or in its midst: ask again); `failed` (an error that invites nothing).
End = Literal["answered", "refused", "broken", "failed"]

# After a broken connection, before the next attempt: what has died is gone from the port by then.
_RECONNECT_S = 0.2


@dataclass(slots=True)
class Choice:
    """What was received of one choice."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None


@dataclass(slots=True)
class Attempt:
    """One HTTP request; times in seconds on the run's clock.

    Attributes:
        sent_s, ended_s: when.
        end: how it ended.
        choices: what came, by index, also of one that broke.
        arrivals: when pieces of a stream came (the whole answer, without a stream), and their tokens.
        status: of HTTP; 0 without an answer.
        error: what went wrong. code: the same for programs, of a refusal.
        retry_after_s: when it was told to come back.
        num_output_tokens: by the usage.
        metrics: the receipt.
    """

    sent_s: float
    ended_s: float = 0.0
    end: End = "failed"
    choices: dict[int, Choice] = field(default_factory=dict)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    status: int = 0
    error: str = ""
    code: str = ""
    retry_after_s: float | None = None
    num_output_tokens: int = 0
    metrics: dict[str, Any] | None = None


@dataclass(slots=True)
class Delivery:
    """A request with all its attempts, under one request id."""

    request: LiveRequest
    request_id: str
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def last(self) -> Attempt:
        """The attempt that decided."""
        return self.attempts[-1]

    @property
    def is_answered(self) -> bool:
        """Whether the whole answer came in the end."""
        return bool(self.attempts) and self.last.end == "answered"

    @property
    def is_turned_away(self) -> bool:
        """Whether it was never accepted: every attempt was refused, until the client had no more patience."""
        return bool(self.attempts) and all(attempt.end == "refused" for attempt in self.attempts)

    @property
    def sent_s(self) -> float:
        """When it was first asked."""
        return self.attempts[0].sent_s

    def number(self, end: End) -> int:
        """Attempts that ended so."""
        return sum(attempt.end == end for attempt in self.attempts)

    @property
    def ttft_ms(self) -> float | None:
        """From the first attempt to the first tokens a client could show; None without a stream."""
        first = next((attempt.arrivals[0][0] for attempt in self.attempts if attempt.arrivals), None)
        if first is None or not self.request.is_stream:
            return None
        return (first - self.sent_s) * 1000.0

    @property
    def e2e_ms(self) -> float:
        """From the first attempt to the end of the last."""
        return (self.last.ended_s - self.sent_s) * 1000.0

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per token after the first, of the longest choice; None where that says nothing."""
        longest = max((len(choice.tokens) for choice in self.last.choices.values()), default=0)
        if self.ttft_ms is None or longest < 2:
            return None
        return (self.e2e_ms - self.ttft_ms) / (longest - 1)

    def attains(self, slo: Mapping[str, float]) -> bool:
        """Whether it met objectives on TTFT and TPOT; an answer in one piece must come within their sum."""
        if not self.is_answered:
            return False
        if not self.request.is_stream:
            longest = max((len(choice.tokens) for choice in self.last.choices.values()), default=0)
            return self.e2e_ms <= slo["ttft_ms"] + slo["tpot_ms"] * max(0, longest - 1)
        ttft_ms, tpot_ms = self.ttft_ms, self.tpot_ms
        in_time = ttft_ms is None or ttft_ms <= slo["ttft_ms"]
        return in_time and (tpot_ms is None or tpot_ms <= slo["tpot_ms"])


class LiveClient(HttpClient):
    """Asks one server until it answers; use as an async context manager.

    Args:
        url: of the server.
        give_up_s: a request without an answer for so long, all attempts together, is lost.
        clock: seconds on the run's clock.
        on_tokens: called with the time and the number of tokens whenever some arrive that no earlier attempt
            has brought: an answer that is asked for again begins with what was received before.
    """

    def __init__(
        self,
        url: str,
        *,
        give_up_s: float,
        clock: Callable[[], float] = time.monotonic,
        on_tokens: Callable[[float, int], None] = lambda at, tokens: None,
    ) -> None:
        super().__init__(url, timeout=aiohttp.ClientTimeout())
        self.model = ""
        self.give_up_s = give_up_s
        self._clock = clock
        self._on_tokens = on_tokens

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.model = (await self.models())[0]["id"]
        return self

    async def ask(
        self, request: LiveRequest, request_id: str, slo: Mapping[str, float] | None = None
    ) -> Delivery:
        """Ask until there is an answer, or an error that does not invite to ask again."""
        delivery = Delivery(request, request_id)
        payload = msgspec.json.encode(request.body(self.model, slo))
        # Both names a server may know an idempotent request by.
        headers = {
            "Content-Type": "application/json",
            "X-Request-Id": request_id,
            "Idempotency-Key": request_id,
        }
        give_up_at = self._clock() + self.give_up_s
        while True:
            attempt = Attempt(self._clock())
            held = _most_tokens(delivery.attempts)
            delivery.attempts.append(attempt)
            try:
                async with asyncio.timeout(max(0.001, give_up_at - self._clock())):
                    await self._attempt(request, payload, headers, attempt, held)
            except TimeoutError:
                attempt.end, attempt.error = "failed", f"no answer within {self.give_up_s:g} s"
            attempt.ended_s = self._clock()
            if attempt.end in ("answered", "failed"):
                return delivery
            pause_s = attempt.retry_after_s if attempt.end == "refused" else _RECONNECT_S
            # What it ended with stays: who was only ever refused is turned away, and not lost.
            if self._clock() + (pause_s or 0.0) >= give_up_at:
                return delivery
            await asyncio.sleep(pause_s or 0.0)

    async def _attempt(
        self,
        request: LiveRequest,
        payload: bytes,
        headers: Mapping[str, str],
        attempt: Attempt,
        held: Mapping[int, int],
    ) -> None:
        try:
            async with self.session.post(self.url + request.path, data=payload, headers=headers) as response:
                attempt.status = response.status
                if response.status != 200:
                    self._take_refusal(attempt, response, await response.read())
                elif request.is_stream:
                    await self._take_stream(attempt, response, held)
                else:
                    self._take(attempt, msgspec.json.decode(await response.read()), held)
                    attempt.end = "answered"
        except (aiohttp.ClientError, OSError) as error:
            attempt.end, attempt.error = "broken", f"{type(error).__name__}: {error}"
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            attempt.end, attempt.error = "failed", f"unreadable answer: {error!r}"

    @staticmethod
    def _take_refusal(attempt: Attempt, response: aiohttp.ClientResponse, body: bytes) -> None:
        attempt.error = f"HTTP {response.status}: {body.decode(errors='replace')[:300]}"
        after = response.headers.get("Retry-After", "")
        if response.status in (429, 503) and after.isdecimal():
            attempt.end, attempt.retry_after_s = "refused", float(after)
            with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
                attempt.code = str(msgspec.json.decode(body)["error"]["code"])

    async def _take_stream(
        self, attempt: Attempt, response: aiohttp.ClientResponse, held: Mapping[int, int]
    ) -> None:
        async for line in response.content:
            data = event_data(line)
            if data is None:
                continue
            if data == b"[DONE]":
                attempt.end = "answered"
                return
            chunk = msgspec.json.decode(data)
            if "error" in chunk:
                attempt.error = f"error event: {str(chunk['error'])[:300]}"
                return
            self._take(attempt, chunk, held)
        attempt.end, attempt.error = "broken", "the stream ended without [DONE]"

    def _take(self, attempt: Attempt, body: Any, held: Mapping[int, int]) -> None:
        """Add a chunk of a stream, or a whole answer; `held` is tokens of each choice that came before."""
        num_tokens = num_new = 0
        for part in body.get("choices") or ():
            choice = attempt.choices.setdefault(part["index"], Choice())
            message = part.get("delta") or part.get("message") or {}
            tokens = part.get("token_ids") or ()
            choice.tokens += tokens
            choice.text += part.get("text") or message.get("content") or ""
            choice.finish_reason = part.get("finish_reason") or choice.finish_reason
            num_tokens += len(tokens)
            num_new += min(len(tokens), max(0, len(choice.tokens) - held.get(part["index"], 0)))
        now = self._clock()
        if num_tokens:
            attempt.arrivals.append((now, num_tokens))
        if num_new:
            self._on_tokens(now, num_new)
        if body.get("usage"):
            attempt.num_output_tokens = body["usage"].get("completion_tokens") or 0
        attempt.metrics = body.get("metrics") or attempt.metrics


def _most_tokens(attempts: Sequence[Attempt]) -> dict[int, int]:
    """How many tokens of each choice any of the attempts has brought."""
    found: dict[int, int] = {}
    for attempt in attempts:
        for index, choice in attempt.choices.items():
            found[index] = max(found.get(index, 0), len(choice.tokens))
    return found
