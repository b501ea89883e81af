"""Requests sent again: a retry with the key of an earlier request attaches to its answer.

Keys belong to who sends them (an API key, or everybody where there are none). The random seed of a request
that names none follows from its key, so that a front end that does not know the answer, because the one that
did has died, generates the very same one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from cluster.idempotency_config import IdempotencyConfig
from deployments.errors import ApiError, bad_request, cancelled, internal
from deployments.front_end_metrics import FrontEndMetrics
from deployments.openai_schema import GenerationRequest
from deployments.replay_log import ReplayLog
from deployments.request_context import current_request
from deployments.request_timeout import request_timeout

_log = logging.getLogger(__name__)

HEADER = "Idempotency-Key"
#: Stripe's: the answer is that of an earlier request.
REPLAYED = "Idempotent-Replayed"
LAST_EVENT_ID = "Last-Event-ID"
_KEY = re.compile(r"[\x20-\x7e]{1,255}")
_SEED_BITS = 53

#: Generates an answer into a log; whether it came to its end.
Produce = Callable[[ReplayLog], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Key:
    """What names a request.

    Attributes:
        name: distinct for each owner and value.
        field: where the client wrote it, for errors.
        body: digest of what was asked.
    """

    name: str
    field: str
    body: str

    @property
    def seed(self) -> int:
        """The random number seed of a request that has none of its own."""
        return int(self.name, 16) >> (4 * len(self.name) - _SEED_BITS)


def find_key(
    config: IdempotencyConfig,
    headers: Mapping[str, str],
    path: str,
    body: Callable[[], Mapping[str, Any]],
    owner: str,
) -> Key | None:
    """The key of a request; None if it has none.

    Args:
        config: which headers count.
        headers: of the request; any case.
        path: of the endpoint.
        body: gives the body as it came; its `request_id` is a key if no header is.
        owner: whose it is, such as the name of an API key.

    Raises:
        ApiError: 400 if the header is malformed, or if there is none and yet an answer is to be continued.
    """
    if not config.enabled:
        _expect_whole(headers)
        return None
    value, field = headers.get(HEADER), HEADER
    if value is not None and not _KEY.fullmatch(value):
        raise bad_request(f"`{HEADER}` must be 1 to 255 printable ASCII characters; a UUID will do.", HEADER)
    if value is None and config.x_request_id:
        value, field = headers.get("X-Request-Id"), "X-Request-Id"
    fields = body()
    if value is None and isinstance(fields.get("request_id"), str):
        value, field = fields["request_id"], "request_id"
    if not value:
        _expect_whole(headers)
        return None
    asked = {name: part for name, part in fields.items() if name != "request_id"}
    return Key(
        name=_digest(owner, field, value), field=field, body=_digest(path, json.dumps(asked, sort_keys=True))
    )


def _expect_whole(headers: Mapping[str, str]) -> None:
    """Refuse who has a part of an answer and no key: all of another one would be sent."""
    if LAST_EVENT_ID in headers:
        raise bad_request(
            f"`{LAST_EVENT_ID}` continues an answer that was asked for with `{HEADER}`, which this request "
            "lacks or this server does not take; without a key leave it out, and all is generated anew.",
            LAST_EVENT_ID,
        )


def seeded(request: GenerationRequest, key: Key | None) -> GenerationRequest:
    """The request with a seed, if a key says which."""
    if key is None or request.seed is not None:
        return request
    return request.model_copy(update={"seed": key.seed})


def first_position(headers: Mapping[str, str]) -> int:
    """The position that a client which has some events continues at; raises 400 if it names no event."""
    last = headers.get(LAST_EVENT_ID)
    if last is None:
        return 0
    if not re.fullmatch(r"[0-9]{1,9}", last):
        raise bad_request(f"`{LAST_EVENT_ID}` must be the `id` of an event, a whole number.", LAST_EVENT_ID)
    return int(last) + 1


class Answer:
    """One answer, being generated or complete.

    Attributes:
        key: of the requests it is the answer to.
        log: what it says.
        num_readers: who follows it now.
        task: generates it; None once it is complete.
        timer: ends what nobody reads, then forgets what is complete.
    """

    __slots__ = ("key", "log", "num_readers", "task", "timer")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.log = ReplayLog()
        self.num_readers = 0
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None


class Follower:
    """One reader of an answer.

    Attributes:
        log: the answer.
        is_replay: whether it is that of an earlier request.
    """

    def __init__(self, answers: Answers, answer: Answer, *, is_replay: bool) -> None:
        self._answers, self._answer = answers, answer
        self.log, self.is_replay = answer.log, is_replay
        self._is_closed = False
        answer.num_readers += 1
        if answer.timer is not None and not answer.log.is_complete:
            answer.timer.cancel()

    async def parts(self, first: int = 0) -> AsyncGenerator[bytes, None]:
        """What `ReplayLog.read` gives; the reader is gone at its end."""
        try:
            async for part in self.log.read(first):
                yield part
            # It failed for everybody who was told so, and not just for whom it was begun.
            if self.log.failure is not None and (request := current_request()) is not None:
                request.error = self.log.failure
        finally:
            self.close()

    def close(self) -> None:
        """The reader is gone; more than once is as good."""
        if not self._is_closed:
            self._is_closed = True
            self._answers.left(self._answer)


# What becomes of requests with a key, and why answers are given up, as counted.
OUTCOMES = ("new", "attached", "replayed", "mismatch", "refused")
DROPPED = ("ttl", "memory", "abandoned")


class Answers:
    """The answers of one front end to requests with keys, for those that ask again (one event loop).

    Args:
        config: how long and how much is kept.
        metrics: where they are counted.
        limit_s: how long an answer may take; any time if None.
        error_part: how a failure in the midst of an answer is told as its last part; None if readers are
            given it as an error.
    """

    def __init__(
        self,
        config: IdempotencyConfig,
        metrics: FrontEndMetrics | None = None,
        limit_s: float | None = None,
        error_part: Callable[[ApiError], bytes] | None = None,
    ) -> None:
        self.config = config
        self._error_part = error_part
        self._metrics = metrics
        self._limit_s = limit_s
        if metrics is not None:  # a counter that has not counted yet is zero, not absent
            for outcome in OUTCOMES:
                metrics.set.counter("flotilla_idempotent_requests_total", outcome)
            for reason in DROPPED:
                metrics.set.counter("flotilla_idempotent_answers_dropped_total", reason)
        self._answers: dict[str, Answer] = {}  # complete ones in the order in which they ended

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def num_bytes(self) -> int:
        """Of all answers."""
        return sum(answer.log.num_bytes for answer in self._answers.values())

    def attach(self, key: Key, produce: Produce) -> Follower:
        """Follow the answer with that key; it is generated, in a task of its own, if there is none.

        Raises:
            ApiError: 422 if the key was used for another request, 429 if no more answers can be kept.
        """
        answer = self._answers.get(key.name)
        if answer is None:
            return Follower(self, self._begin(key, produce), is_replay=False)
        if answer.key.body != key.body:
            self._count("mismatch")
            raise ApiError(
                422,
                f"`{key.field}` was sent with another request before. To repeat that one, send the same "
                "body to the same endpoint; for a new one, choose a new key.",
                param=key.field,
                code="idempotency_key_reused",
            )
        self._count("replayed" if answer.log.is_complete else "attached")
        return Follower(self, answer, is_replay=True)

    def left(self, answer: Answer) -> None:
        """A reader is gone; without any, an answer is generated for a while only."""
        answer.num_readers -= 1
        if not answer.num_readers and not answer.log.is_complete:
            loop = asyncio.get_running_loop()
            answer.timer = loop.call_later(self.config.grace_s, self._abandon, answer)

    async def close(self) -> None:
        """End those being generated, and forget all."""
        tasks = [answer.task for answer in self._answers.values() if answer.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for answer in list(self._answers.values()):
            self._forget(answer)

    # -- parts -----------------------------------------------------------------------------------------

    def _begin(self, key: Key, produce: Produce) -> Answer:
        self._make_room(1)
        if len(self._answers) >= self.config.max_answers or self.num_bytes >= self.config.max_bytes:
            self._count("refused")
            raise ApiError(
                429,
                "The answers being generated to requests with a key are as many as this server keeps; try "
                f"again in a moment, or without `{key.field}`.",
                param=key.field,
                code="too_many_requests",
                retry_after_s=1.0,
                dropped_reason="rejected-saturated",
            )
        self._count("new")
        answer = self._answers[key.name] = Answer(key)
        answer.task = asyncio.create_task(self._run(answer, produce), name=f"answer {key.name[:8]}")
        return answer

    async def _run(self, answer: Answer, produce: Produce) -> None:
        log = answer.log
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                is_whole = await produce(log)
        except asyncio.CancelledError:
            self._failed(answer, cancelled())
            raise
        except ApiError as error:
            self._failed(answer, error)
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired() and self._limit_s is not None:
                self._failed(answer, request_timeout(self._limit_s))
                return
            request = current_request()
            request_id = request.request_id if request is not None else ""
            _log.exception("request %s failed", request_id)
            self._failed(answer, internal(request_id))
        else:
            log.complete()
            if is_whole:
                self._keep(answer)
            else:
                self._forget(answer)

    def _keep(self, answer: Answer) -> None:
        """A complete answer is kept for a while, as the newest."""
        if self._answers.get(answer.key.name) is not answer:
            return
        self._answers[answer.key.name] = self._answers.pop(answer.key.name)
        if answer.timer is not None:
            answer.timer.cancel()
        # Neither the task nor the timer's context is to hold the request and its connection for so long.
        answer.task = None
        answer.timer = asyncio.get_running_loop().call_later(
            self.config.ttl_s, self._drop, answer, "ttl", context=Context()
        )
        self._make_room(0)

    def _failed(self, answer: Answer, error: ApiError) -> None:
        """Its readers are told; who tries again begins anew."""
        if len(answer.log) and self._error_part is not None:
            answer.log.add(self._error_part(error))
            answer.log.failure = error
            answer.log.complete()
        else:
            answer.log.complete(error)
        self._forget(answer)

    def _make_room(self, number: int) -> None:
        """Drop the oldest complete answers until the bounds hold with so many more."""
        complete = [answer for answer in self._answers.values() if answer.log.is_complete]
        for answer in complete:
            fits = len(self._answers) + number <= self.config.max_answers
            if fits and self.num_bytes <= self.config.max_bytes:
                return
            self._drop(answer, "memory")

    def _abandon(self, answer: Answer) -> None:
        """Nobody came back for it."""
        if answer.task is not None and not answer.num_readers and not answer.log.is_complete:
            self._count_dropped("abandoned")
            self._forget(answer)  # who comes back now begins anew
            answer.task.cancel()

    def _drop(self, answer: Answer, reason: str) -> None:
        self._count_dropped(reason)
        self._forget(answer)

    def _forget(self, answer: Answer) -> None:
        if self._answers.get(answer.key.name) is answer:
            del self._answers[answer.key.name]
        if answer.timer is not None:
            answer.timer.cancel()

    def _count(self, outcome: str) -> None:
        if self._metrics is not None:
            self._metrics.set.counter("flotilla_idempotent_requests_total", outcome).inc()

    def _count_dropped(self, reason: str) -> None:
        if self._metrics is not None:
            self._metrics.set.counter("flotilla_idempotent_answers_dropped_total", reason).inc()


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(f"{len(part)}:{part}" for part in parts).encode()).hexdigest()
