"""The gRPC service, free of how it is served: messages in, messages out, failures as `ApiError`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from grpc_health.v1 import health_pb2

from cluster.metric_set import flotilla_version
from deployments import grpc_mapping as mapping
from deployments.answering import INLINE_LOGPROBS, Call, translated
from deployments.api_service import ApiService
from deployments.authentication import Authenticator, Grant
from deployments.call_ids import new_call_id
from deployments.errors import ApiError, bad_request, not_ready
from deployments.front_end_metrics import FrontEndMetrics
from deployments.grpc_calls import counted
from deployments.grpc_retries import KEY, KeyedCalls, refuse_keys
from deployments.idempotency import Key, seeded
from deployments.objectives import ObjectiveError, asked_by_headers
from deployments.prompt_preparation import INLINE_BYTES, in_thread_if
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from deployments.request_context import current_request
from deployments.sampling_mapping import num_logprobs

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Generation"].full_name
HEALTH_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

#: How often a watched health is looked at.
_WATCH_INTERVAL_S = 1.0
MOST_WATCHES = 64

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@dataclass
class _Answer:
    """A request on its way, and what its messages have in common."""

    call: Call
    call_id: str
    model: str
    created: int
    writer: mapping.ChoiceWriter


class GenerationService:
    """`flotilla.v1.Generation` and `grpc.health.v1.Health`, for one event loop.

    Args:
        service: the API.
        metrics: count the calls.
        behind_proxy: requests come through a proxy of ours, which has named the calls; Ray Serve waits for
            them before it says that this process is to end.
        authenticator: who is let in, by the metadata `authorization` or `x-api-key`; everybody if None.
        keyed: answers calls with keys; None refuses them.
        leaving: set once the server takes no new calls; who watches its health is told, and then let go.
    """

    def __init__(
        self,
        service: ApiService,
        metrics: FrontEndMetrics | None = None,
        *,
        behind_proxy: bool = False,
        authenticator: Authenticator | None = None,
        keyed: KeyedCalls | None = None,
        leaving: asyncio.Event | None = None,
    ) -> None:
        self._service = service
        self._leaving = leaving or asyncio.Event()
        self._num_watches = 0
        self._keyed = keyed
        self._authenticator = authenticator or Authenticator(environment={})
        self._metrics = metrics or FrontEndMetrics()
        self._behind_proxy = behind_proxy

    # -- flotilla.v1.Generation ------------------------------------------------------------------------

    async def generate(
        self, request: pb.GenerateRequest, metadata: Mapping[str, str], ends_at: float | None = None
    ) -> pb.GenerateResponse:
        """A whole answer; raises `ApiError`.

        Cancelled at `ends_at` or later, by the loop's time, it counts as one whose deadline passed.
        """
        with self._admitted("Generate", metadata, request.request_id, ends_at, limited=True) as grant:
            key = await self._key_of(request, metadata, "Generate", grant)
            if key is None or self._keyed is None:
                return await self._generate(request, metadata, grant)
            return await self._keyed.whole(key, grant, lambda: self._generate(request, metadata, grant, key))

    async def _generate(
        self, request: pb.GenerateRequest, metadata: Mapping[str, str], grant: Grant, key: Key | None = None
    ) -> pb.GenerateResponse:
        answer = await self._begin(request, metadata, grant, key)
        call = answer.call
        async with aclosing(translated(call)) as updates:
            async for update in updates:
                call.states[update.choice].add(update)
        write = answer.writer.whole
        choices = await in_thread_if(
            call.takes_long, lambda: [write(index, state) for index, state in enumerate(call.kept())]
        )
        return pb.GenerateResponse(
            id=answer.call_id,
            request_id=call.request_id,
            model=answer.model,
            created=answer.created,
            choices=choices,
            usage=mapping.usage(_usage(call)),
            metrics=mapping.metrics(call.receipt()),
        )

    async def generate_stream(
        self, request: pb.GenerateRequest, metadata: Mapping[str, str], ends_at: float | None = None
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        """An answer as it grows; close the generator to end the request. Raises `ApiError`."""
        with self._admitted("GenerateStream", metadata, request.request_id, ends_at, limited=True) as grant:
            key = await self._key_of(request, metadata, "GenerateStream", grant)
            if key is None or self._keyed is None:
                made = self._stream(request, metadata, grant)
            else:
                made = self._keyed.stream(
                    key, grant, metadata, lambda: self._stream(request, metadata, grant, key)
                )
            async with aclosing(made) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _stream(
        self, request: pb.GenerateRequest, metadata: Mapping[str, str], grant: Grant, key: Key | None = None
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        answer = await self._begin(request, metadata, grant, key, stream=True)
        call = answer.call
        async with aclosing(translated(call)) as updates:
            async for update in updates:
                if not (update.text or update.finish_reason is not None or call.shows_all):
                    reasoning = call.states[update.choice].reasoning
                    if reasoning is not None:
                        reasoning.feed("", update.tokens)
                    continue  # its text is held back: it may be part of a stop string or of a character
                delta = partial(answer.writer.delta, update, call.states[update.choice])
                choice = await in_thread_if(len(update.prompt_logprobs) > INLINE_LOGPROBS, delta)
                if choice is None:
                    continue
                chunk = pb.GenerateChunk(
                    id=answer.call_id,
                    request_id=call.request_id,
                    model=answer.model,
                    created=answer.created,
                    choice=choice,
                )
                if call.is_finished:
                    chunk.usage.CopyFrom(mapping.usage(_usage(call)))
                    chunk.metrics.CopyFrom(mapping.metrics(call.receipt()))
                yield chunk

    async def cancel(
        self, request: pb.CancelRequest, metadata: Mapping[str, str] = MappingProxyType({})
    ) -> pb.CancelResponse:
        """End requests of the same key by their id; raises `ApiError` (503) if the cell cannot be told."""
        with self._admitted("Cancel", metadata, request.request_id) as grant:
            if not request.request_id:
                raise bad_request("`request_id` is empty; give the id of the request to end.", "request_id")
            try:
                number = await self._service.cancel(self._named(grant, request.request_id))
            except TimeoutError as error:
                raise not_ready("The model does not answer, and may still work on the request.") from error
        return pb.CancelResponse(num_cancelled=number)

    async def cancel_call(self, call_id: str) -> int:
        """End one call; how many of its choices were running. Raises `TimeoutError`."""
        return await self._service.cancel_call(call_id)

    async def list_models(self, metadata: Mapping[str, str] = MappingProxyType({})) -> pb.ListModelsResponse:
        """The served model, and its adapters."""
        with self._admitted("ListModels", metadata) as grant:
            info = grant.seen(await self._service.info(waits=True))
            return pb.ListModelsResponse(models=[mapping.model(info, name) for name in info.models])

    async def describe(self, metadata: Mapping[str, str] = MappingProxyType({})) -> pb.DescribeResponse:
        """What the server is; it answers also while it is not ready, but then without the model."""
        with self._admitted("Describe", metadata) as grant:
            response = pb.DescribeResponse(version=flotilla_version())
            with contextlib.suppress(ApiError):
                await self._service.ready()
                info = grant.seen(await self._service.info(waits=True))
                if info.models:
                    response.model.CopyFrom(mapping.model(info, info.models[0]))
                response.ready = True
            return response

    # -- grpc.health.v1.Health -------------------------------------------------------------------------

    async def check(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        """Whether requests would be served now; raises `ApiError` (404) for a service that is not here."""
        status = await self._health(request.service)
        if status == _SERVICE_UNKNOWN:
            raise ApiError(
                404, f"There is no service {request.service[:80]!r} here.", param="service", code="not_found"
            )
        return health_pb2.HealthCheckResponse(status=status)

    async def watch(
        self, request: health_pb2.HealthCheckRequest
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """The health now, and whenever it changes; it ends with the server, which waits for calls to end."""
        if self._behind_proxy:
            raise ApiError(
                501,
                "The health cannot be watched through Ray Serve's proxy (`grpc.direct: false`), which would "
                "keep the front end that tells it from ending; ask with Check.",
                code="unsupported_parameter",
            )
        if self._num_watches >= MOST_WATCHES:  # each wakes once a second, and none needs a key
            raise ApiError(
                429,
                "As many watch the health as this server allows; ask with Check.",
                code="too_many_requests",
            )
        told = -1
        self._num_watches += 1
        try:
            while not self._leaving.is_set():
                status = await self._health(request.service)
                if status != told:
                    told = int(status)
                    yield health_pb2.HealthCheckResponse(status=status)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_WATCH_INTERVAL_S):
                        await self._leaving.wait()
        finally:
            self._num_watches -= 1
        if told == _SERVING:
            yield health_pb2.HealthCheckResponse(status=_NOT_SERVING)

    async def _health(self, service: str) -> Any:
        if service not in ("", SERVICE_NAME, HEALTH_NAME):
            return _SERVICE_UNKNOWN
        try:
            await self._service.ready()
        except ApiError:
            return _NOT_SERVING
        return _SERVING

    # -- parts -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _admitted(
        self,
        method: str,
        metadata: Mapping[str, str],
        request_id: str = "",
        ends_at: float | None = None,
        *,
        limited: bool = False,
    ) -> Iterator[Grant]:
        """A call within; see `counted` and `Authenticator.admitted`."""
        authorization = mapping.authorization_of(metadata)
        with (
            counted(self._metrics, method, metadata, request_id, ends_at) as request,
            self._authenticator.admitted(
                authorization, "api", limited=limited, may_attach=KEY in metadata
            ) as grant,
        ):
            request.state["grant"] = grant
            yield grant

    def _named(self, grant: Grant, request_id: str) -> str:
        # Serve's proxy knows no keys, and names calls by their request id alone.
        return request_id if self._behind_proxy else grant.named(request_id)

    async def _key_of(
        self, request: pb.GenerateRequest, metadata: Mapping[str, str], method: str, grant: Grant
    ) -> Key | None:
        if self._keyed is None:
            refuse_keys(metadata)
            return None
        found = partial(self._keyed.key_of, request, metadata, method, grant)
        return await in_thread_if(request.ByteSize() > INLINE_BYTES, found)

    async def _begin(
        self,
        message: pb.GenerateRequest,
        metadata: Mapping[str, str],
        grant: Grant,
        key: Key | None = None,
        *,
        stream: bool = False,
    ) -> _Answer:
        grant.check_place()
        context = current_request()
        assert context is not None  # `counted` has entered it
        request_id = context.request_id
        name = self._named(grant, request_id)
        call_id = new_call_id(name, message.proxy_call_id if self._behind_proxy else None)
        try:
            read = partial(mapping.generation_request, message, stream=stream)
            request = seeded(await in_thread_if(message.ByteSize() > INLINE_BYTES, read), key)
            headers = asked_by_headers(metadata)
            grant.seen(await self._service.info()).adapter_of(request.model)
            call = await self._service.begin(
                request,
                request_id,
                headers,
                call_id=call_id,
                tenant=grant.tenant,
                repeatable=key is not None and stream,
            )
            grant.take(call, request, await self._service.info())
        except ObjectiveError as error:
            raise bad_request(error.message, error.place) from None
        writer = mapping.ChoiceWriter(
            self._service.codec,
            with_token_ids=bool(request.return_token_ids),
            with_logprobs=num_logprobs(request) is not None,
            tokens_as_ids=bool(request.return_tokens_as_token_ids),
        )
        return _Answer(call, call_id, call.shape.envelope.model, int(time.time()), writer)


def _usage(call: Call) -> dict[str, object]:
    body: dict[str, object] = {}
    call.add_usage(body)
    usage_fields = body["usage"]
    assert isinstance(usage_fields, dict)
    return usage_fields
