"""Answers over gRPC that are generated once, however often they are asked for (`idempotency`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing

from cluster.idempotency_config import IdempotencyConfig
from deployments.authentication import Grant
from deployments.errors import ApiError
from deployments.front_end_metrics import FrontEndMetrics
from deployments.idempotency import HEADER, LAST_EVENT_ID, Answers, Key, find_key, first_position
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from deployments.replay_log import ReplayLog

#: Metadata of a call; HTTP's headers, in the case that gRPC wants.
KEY, LAST_EVENT = HEADER.lower(), LAST_EVENT_ID.lower()


class KeyedCalls:
    """The answers of one gRPC server to calls with keys, for those that ask again (one event loop).

    How long an answer may take is up to the deadlines of the calls that wait for it.

    Args:
        config: how long and how much is kept.
        metrics: where they are counted.
    """

    def __init__(
        self, config: IdempotencyConfig | None = None, metrics: FrontEndMetrics | None = None
    ) -> None:
        self._answers = Answers(config or IdempotencyConfig(), metrics)

    def key_of(
        self, message: pb.GenerateRequest, metadata: Mapping[str, str], method: str, grant: Grant
    ) -> Key | None:
        """The key of a call, from its metadata; None if it has none. Raises 400 as `find_key` does."""
        named = {
            HEADER: metadata.get(KEY),
            "X-Request-Id": metadata.get("x-request-id"),
            LAST_EVENT_ID: metadata.get(LAST_EVENT),
        }
        headers = {name: value for name, value in named.items() if value is not None}
        if not headers:
            return None
        owner = "" if grant.key is None else grant.key.name
        return find_key(self._answers.config, headers, method, lambda: _asked(message), owner)

    async def whole(
        self, key: Key, grant: Grant, make: Callable[[], Awaitable[pb.GenerateResponse]]
    ) -> pb.GenerateResponse:
        """The answer with that key; `make` is called if there is none. Raises `ApiError`."""

        async def produce(log: ReplayLog) -> bool:
            # What it uses counts until its end, also when nobody reads it any longer.
            with grant.held():
                log.add((await make()).SerializeToString())
            return True

        follower = self._answers.attach(key, produce)
        try:
            return pb.GenerateResponse.FromString(await anext(follower.parts()))
        finally:
            follower.close()

    async def stream(
        self,
        key: Key,
        grant: Grant,
        metadata: Mapping[str, str],
        make: Callable[[], AsyncGenerator[pb.GenerateChunk, None]],
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        """Its chunks, from the one after that which the caller has; likewise."""
        last = metadata.get(LAST_EVENT)
        first = first_position({} if last is None else {LAST_EVENT_ID: last})

        async def produce(log: ReplayLog) -> bool:
            is_whole = False
            with grant.held():
                async with aclosing(make()) as chunks:
                    async for chunk in chunks:
                        chunk.event_id = len(log)
                        log.add(chunk.SerializeToString())
                        is_whole = chunk.HasField("usage")
            return is_whole

        follower = self._answers.attach(key, produce)
        async with aclosing(follower.parts(first)) as parts:
            async for part in parts:
                yield pb.GenerateChunk.FromString(part)

    async def close(self) -> None:
        """End those being generated, and forget all."""
        await self._answers.close()


def refuse_keys(metadata: Mapping[str, str]) -> None:
    """Raise 501 for a call with a key: Ray Serve's proxy, by which it came, ends abandoned ones."""
    if KEY in metadata:
        raise ApiError(
            501,
            f"`{KEY}` is not supported through Ray Serve's proxy (`grpc.direct: false`), which ends the "
            "request of a client that goes away; leave it out, or ask over HTTP.",
            param=KEY,
            code="unsupported_parameter",
        )


def _asked(message: pb.GenerateRequest) -> Mapping[str, str]:
    asked = pb.GenerateRequest()
    asked.CopyFrom(message)
    asked.ClearField("request_id")
    return {"message": asked.SerializeToString(deterministic=True).hex()}
