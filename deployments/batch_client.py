"""Sending the requests of a batch to any OpenAI-compatible server, for as long as it takes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import mktime_tz, parsedate_tz
from typing import Any

import aiohttp

from deployments.api_keys import KEY_VARIABLE, client_headers
from deployments.batch_file import BatchRequest, answer_line, error_line
from deployments.client_tls import client_context
from deployments.connection_errors import moved, reason
from deployments.server_url import server_root

#: The server is full, or so busy that the request took longer than it may: fewer at a time are answered.
_FULL = (429, 503, 504)
#: What stands before the server does not find it.
_AWAY = (502,)
#: That the key is wrong.
_FORBIDDEN = (401, 403)
#: A later appointment leaves the request's place to others, or a long one would keep them all waiting.
_HELD_S = 60.0
#: The longest that a server is believed to want nobody to come back.
_MOST_WAITED_S = 3600.0
_PROBE_S = 60.0


class BatchStopped(Exception):
    """No request of the batch can be answered; the message says why."""


@dataclass(frozen=True)
class BatchOptions:
    """How requests are sent.

    Attributes:
        url: of the server.
        concurrency: requests open at once, at most.
        tier: `service_tier` of requests without one.
        priority: of requests without one; none is sent if 0, which is every request's.
        model: of requests without one; the server's first if None.
        backoff_s: the least and the most that is waited where a server does not say how long.
    """

    url: str
    concurrency: int = 64
    tier: str | None = None
    priority: int = 10
    model: str | None = None
    backoff_s: tuple[float, float] = (1.0, 60.0)

    def fill(self, body: Mapping[str, Any], model: str | None) -> dict[str, Any]:
        """The body as it is sent: with what it does not say."""
        defaults = {"model": model, "service_tier": self.tier, "priority": self.priority or None}
        missing = {name: value for name, value in defaults.items() if body.get(name) is None}
        return {**body, **{name: value for name, value in missing.items() if value is not None}}


@dataclass
class BatchProgress:
    """What has become of a batch so far.

    Attributes:
        total: requests to send.
        num_answered, num_failed: answered with 200, and ended otherwise.
        num_tokens: generated, as the server counts them.
        num_waiting: told to come back later, or their connection broke.
        trouble: why the last of these waits.
        failure: why the first of those that failed did.
    """

    total: int
    num_answered: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    num_waiting: int = 0
    trouble: str = ""
    failure: str = ""

    @property
    def num_ended(self) -> int:
        """Requests that are not sent again."""
        return self.num_answered + self.num_failed


class Window:
    """How many requests may be open: half as many after a refusal, one more after each answer.

    Requests that were sent before a refusal and are refused as well tell nothing new: they count once.
    """

    def __init__(self, most: int) -> None:
        self.limit = self._most = most
        self.round = 0
        self._num_open = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Wait for a place; the first to come need not be the first to get it."""
        while self._num_open >= self.limit:
            place = asyncio.get_running_loop().create_future()
            self._waiting.append(place)
            await place
        self._num_open += 1

    def leave(self) -> None:
        """Give the place back."""
        self._num_open -= 1
        self._wake()

    def answered(self) -> None:
        """A request was answered."""
        self.limit = min(self._most, self.limit + 1)
        self._wake()

    def refused(self, sent_in: int) -> None:
        """A request was refused that had been sent in this round."""
        if sent_in == self.round:
            self.round += 1
            self.limit = max(1, self.limit // 2)

    def _wake(self) -> None:
        num_free = self.limit - self._num_open
        while num_free > 0 and self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                num_free -= 1


@dataclass(eq=False)
class _Job:
    """A request, and how often in a row it could not be answered."""

    request: BatchRequest
    num_tries: int = field(default=0)


async def send_batch(
    requests: Sequence[BatchRequest],
    write: Callable[[dict[str, Any]], None],
    options: BatchOptions,
    progress: BatchProgress,
    changed: Callable[[], None] = lambda: None,
) -> None:
    """Send requests, and write a line for each as it ends.

    Args:
        write: is given the lines.
        progress: is kept up to date, and `changed` called when it has changed.

    Raises:
        BatchStopped: if the server is not there, or its first answer is that the key is wrong.
    """
    async with _session() as session:
        sender = _Sender(requests, write, options, progress, changed, session)
        await sender.find_server()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(options.concurrency, len(requests))):
                    group.create_task(sender.work())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None


@contextlib.asynccontextmanager
async def _session() -> AsyncIterator[aiohttp.ClientSession]:
    # No bound on the time of an answer: in the background it may take hours, in which nothing is sent.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    connector = aiohttp.TCPConnector(limit=0, ssl=client_context(), socket_factory=_watched_socket)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=client_headers()
    ) as session:
        yield session


def _watched_socket(address: Any) -> socket.socket:
    """A socket that finds out in two minutes when there is nobody at its other end any longer."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


class _Sender:
    def __init__(
        self,
        requests: Sequence[BatchRequest],
        write: Callable[[dict[str, Any]], None],
        options: BatchOptions,
        progress: BatchProgress,
        changed: Callable[[], None],
        session: aiohttp.ClientSession,
    ) -> None:
        self._jobs = deque(_Job(request) for request in requests)
        self._needs_model = options.model is None and not all(request.has_model for request in requests)
        self._model = options.model
        self._write, self._options = write, options
        self._progress, self._changed = progress, changed
        self._session, self._root = session, server_root(options.url)
        self._window = Window(options.concurrency)

    async def find_server(self) -> None:
        """See that there is a server, and ask for its first model if requests need it."""
        job = _Job(BatchRequest("", "/v1/models", b"", False))
        while True:
            try:
                timeout = aiohttp.ClientTimeout(total=_PROBE_S, sock_connect=10)
                async with self._session.get(f"{self._root}/v1/models", timeout=timeout) as response:
                    raw = await response.read()
            except (aiohttp.ClientError, OSError) as error:
                raise BatchStopped(f"cannot reach {self._options.url}: {reason(error)}") from None
            if (elsewhere := moved(response, "/v1/models")) is not None:
                raise BatchStopped(f"{self._options.url} {elsewhere}")
            if not self._needs_model:
                return
            if response.status not in (*_FULL, *_AWAY):
                self._model = _first_model(raw)
                return
            await self._wait(self._pause(job, response.headers, f"status {response.status}"))

    async def work(self) -> None:
        """Send one request after the other, each until it has an answer."""
        while True:
            await self._window.enter()
            try:
                if not self._jobs:  # those that wait are in the hands of others
                    return
                job = self._jobs.popleft()
                pause_s = await self._try(job)
                if pause_s is None:
                    continue
                # It keeps its place: others sent in its stead would be refused as well.
                await self._wait(min(pause_s, _HELD_S))
            finally:
                self._window.leave()
            if pause_s > _HELD_S:
                await self._wait(pause_s - _HELD_S)
            self._jobs.appendleft(job)

    async def _try(self, job: _Job) -> float | None:
        """Send a request; how long to wait before it is sent again, None if it has ended."""
        request, sent_in = job.request, self._window.round
        body = self._options.fill(request.body, self._model)
        headers = {"Content-Type": "application/json", "Idempotency-Key": idempotency_key(request, body)}
        url, data = f"{self._root}{request.endpoint}", json.dumps(body).encode()
        try:
            async with self._session.post(url, data=data, headers=headers) as response:
                raw = await response.read()
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            return self._pause(job, {}, reason(error))
        except aiohttp.ClientError as error:  # what came is no HTTP
            self._end(error_line(request.custom_id, "invalid_answer", reason(error)))
            return None
        if (elsewhere := moved(response, request.endpoint)) is not None:
            self._end(error_line(request.custom_id, "moved", f"{url} {elsewhere}"))
            return None
        status = response.status
        if status in (*_FULL, *_AWAY):
            if status in _FULL:
                self._window.refused(sent_in)
            return self._pause(job, response.headers, f"{status}: {_message(raw)}")
        if status in _FORBIDDEN and not self._progress.num_ended:
            told = f"{self._options.url} answers {status}: {_message(raw)}"
            raise BatchStopped(f"{told} (the key that is sent is that of {KEY_VARIABLE})")
        self._window.answered()
        self._end(_line(request, status, response.headers, raw))
        return None

    def _pause(self, job: _Job, headers: Mapping[str, str], trouble: str) -> float:
        self._progress.trouble = trouble
        told_s = retry_after(headers.get("Retry-After", ""))
        if told_s is not None:
            return told_s
        least_s, most_s = self._options.backoff_s
        job.num_tries += 1
        return random.uniform(least_s, min(most_s, least_s * 2 ** min(job.num_tries, 30)))

    async def _wait(self, pause_s: float) -> None:
        self._progress.num_waiting += 1
        self._changed()
        try:
            await asyncio.sleep(pause_s)
        finally:
            self._progress.num_waiting -= 1
            self._changed()

    def _end(self, line: dict[str, Any]) -> None:
        self._write(line)
        response = line["response"] or {}
        if response.get("status_code") == 200:
            self._progress.num_answered += 1
            self._progress.num_tokens += _num_tokens(response["body"])
        else:
            self._progress.num_failed += 1
            self._progress.failure = self._progress.failure or _failure(line)
        self._changed()


def idempotency_key(request: BatchRequest, body: Mapping[str, Any]) -> str:
    """The same whenever this request is sent, and no other's."""
    asked = json.dumps([request.custom_id, request.endpoint, body], sort_keys=True)
    return f"batch-{hashlib.sha256(asked.encode()).hexdigest()}"


def retry_after(value: str) -> float | None:
    """Seconds to wait, of a header that says seconds or a date; None if it says neither, or a time past."""
    try:
        wanted_s = float(value)
    except ValueError:
        date = parsedate_tz(value)
        try:
            wanted_s = 0.0 if date is None else mktime_tz(date) - time.time()
        except (ValueError, OverflowError):  # a year that no calendar has
            return None
    return min(wanted_s, _MOST_WAITED_S) if wanted_s > 0 else None


def _line(request: BatchRequest, status: int, headers: Mapping[str, str], raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
        # Python takes NaN and 1e999 for numbers; a file that holds them is refused when the batch goes on.
        json.dumps(body, allow_nan=False)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        if status == 200:
            told = f"the answer is no JSON object: {_message(raw)}"
            return error_line(request.custom_id, "invalid_answer", told)
        body = {"error": {"message": _message(raw)}}
    request_id = headers.get("X-Request-Id") or body.get("id")
    return answer_line(request.custom_id, status, str(request_id or ""), body)


def _failure(line: dict[str, Any]) -> str:
    """Why there is no answer: the server's status and message, or what came in their place."""
    response = line["response"]
    if response is None:
        return str(line["error"]["message"])
    error = response["body"].get("error")
    told = error.get("message") if isinstance(error, dict) else error
    return f"{response['status_code']}: {told}"


def _num_tokens(body: Mapping[str, Any]) -> int:
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return 0
    number = usage.get("completion_tokens", usage.get("output_tokens"))
    return number if isinstance(number, int) else 0


def _first_model(raw: bytes) -> str | None:
    try:
        return str(json.loads(raw)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        return None


def _message(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return raw[:200].decode(errors="replace")
