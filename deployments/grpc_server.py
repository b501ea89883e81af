"""The gRPC service on a port of its own, in a thread of a front end (`grpc.direct`)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.grpc_config import GrpcConfig
from cluster.idempotency_config import IdempotencyConfig
from deployments import grpc_mapping as mapping
from deployments.api_service import ApiService
from deployments.authentication import Authenticator
from deployments.errors import ApiError
from deployments.front_end_metrics import FrontEndMetrics
from deployments.grpc_leaving import LettingGo
from deployments.grpc_reading import Reading
from deployments.grpc_retries import KeyedCalls
from deployments.grpc_service import HEALTH_NAME, SERVICE_NAME, GenerationService
from deployments.listening import listening_sockets, turn_new_connections_away
from deployments.open_calls import CUT_OFF, TOLD_S, OpenCalls
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from deployments.proto.flotilla.v1 import generation_pb2_grpc as pb_grpc

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_Message = TypeVar("_Message")
_Context = grpc.aio.ServicerContext[Any, Any]

_START_TIMEOUT_S = 20.0
#: How often a server is asked whether it has failed, which it does not tell by itself while calls go on.
_LOOK_S = 0.1
_ANY_TIME_S = 1e9
#: A client whose deadline passes cancels its call, mostly before the server sees that it has: what it is told
#: of the deadline is rounded up to two digits or three, and was under way.
_ROUNDED_UP, _CLOCKS_APART_S = 0.01, 0.05


class GenerationServicer(pb_grpc.GenerationServicer, health_pb2_grpc.HealthServicer):
    """`GenerationService` for a server of grpc.aio.

    Streams are written from coroutines: a client's cancellation is raised at the `await` that runs, also
    where that is the write itself, so that a request always ends with its call. In an asynchronous generator
    it would stay unnoticed while the generator waits at its `yield`.
    """

    def __init__(self, service: GenerationService, config: GrpcConfig, calls: OpenCalls) -> None:
        self._service = service
        self._calls = calls
        self._default_deadline_s = config.default_deadline_s
        self._write_timeout_s = config.write_timeout_s

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> pb.GenerateResponse:
        """A whole answer."""
        async with self._deadline(context) as ends_at:
            answer = self._service.generate(request, mapping.metadata_of(context), ends_at)
            return await _answered(context, answer)

    async def GenerateStream(self, request: pb.GenerateRequest, context: _Context) -> None:
        """An answer as it grows."""
        async with self._deadline(context) as ends_at:
            chunks = self._service.generate_stream(request, mapping.metadata_of(context), ends_at)
            await _answered(context, self._write(context, chunks))

    async def Cancel(self, request: pb.CancelRequest, context: _Context) -> pb.CancelResponse:
        """End requests by their id."""
        return await _answered(context, self._service.cancel(request, mapping.metadata_of(context)))

    async def ListModels(self, request: pb.ListModelsRequest, context: _Context) -> pb.ListModelsResponse:
        """The models served."""
        return await _answered(context, self._service.list_models(mapping.metadata_of(context)))

    async def Describe(self, request: pb.DescribeRequest, context: _Context) -> pb.DescribeResponse:
        """What the server is."""
        return await _answered(context, self._service.describe(mapping.metadata_of(context)))

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        """Whether requests would be served now."""
        return await _answered(context, self._service.check(request))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _Context) -> None:
        """The health, whenever it changes."""
        await _answered(context, self._write(context, self._service.watch(request)))

    async def _write(self, context: _Context, messages: AsyncGenerator[_Message, None]) -> None:
        async with aclosing(messages):
            async for message in messages:
                try:
                    async with asyncio.timeout(self._write_timeout_s):
                        await context.write(message)
                except TimeoutError:
                    raise ApiError(
                        408,
                        f"The answer was not read for {self._write_timeout_s:g} s, the server's "
                        "`grpc.write_timeout_s`.",
                        code="request_timeout",
                    ) from None

    @contextlib.asynccontextmanager
    async def _deadline(self, context: _Context) -> AsyncIterator[float | None]:
        """End what takes longer than the default deadline; a deadline of the client's own, gRPC enforces."""
        own = _left_s(context)
        try:
            async with asyncio.timeout(self._default_deadline_s if own is None else None) as limit:
                ends_at = limit.when()
                if own is not None:
                    left_s = own * (1.0 - _ROUNDED_UP) - _CLOCKS_APART_S
                    ends_at = asyncio.get_running_loop().time() + left_s
                with self._calls.with_one(limit):
                    yield ends_at
        except TimeoutError:
            if self._calls.are_cut_off:
                await context.abort(*mapping.status(CUT_OFF))
            await context.abort(*mapping.status(mapping.deadline_exceeded(self._default_deadline_s)))


def _left_s(context: _Context) -> float | None:
    """Until a deadline of the client's own."""
    return context.time_remaining()


async def _answered(context: _Context, work: Awaitable[_Result]) -> _Result:
    """The result of `work`; an `ApiError` becomes the call's status."""
    try:
        return await work
    except ApiError as error:
        await context.abort(*mapping.status(error))


def make_server(
    config: GrpcConfig,
    service: ApiService,
    metrics: FrontEndMetrics | None = None,
    credentials: grpc.ServerCredentials | None = None,
    authenticator: Authenticator | None = None,
    idempotency: IdempotencyConfig | None = None,
    leaving: asyncio.Event | None = None,
    calls: OpenCalls | None = None,
) -> grpc.aio.Server:
    """A server for the running event loop, bound to its port but not started.

    Args:
        config: `host` and `port`; replicas of one node share the port, and the kernel spreads connections.
        service: what answers.
        metrics: count the calls.
        credentials: serve with TLS.
        authenticator: who is let in; everybody if None.
        idempotency: how answers are kept for retries; as by default if None.
        leaving: set before it is stopped, so that nobody who watches its health, or may ask what services it
            has, keeps it from ending.
        calls: those under way, for who cuts them off.

    Raises:
        RuntimeError: if the port cannot be had.
    """
    keepalive_ms = int(1e3 * config.keepalive_s)
    leaving = leaving or asyncio.Event()
    metrics = metrics or FrontEndMetrics()
    authenticator = authenticator or Authenticator(environment={})
    server = grpc.aio.server(
        interceptors=[
            Reading(config.read_timeout_s, metrics, authenticator),
            LettingGo(leaving, config.read_timeout_s),
        ],
        options=[
            ("grpc.so_reuseport", 1),
            ("grpc.max_receive_message_length", config.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.keepalive_time_ms", keepalive_ms),
            ("grpc.keepalive_timeout_ms", keepalive_ms),
            ("grpc.http2.ping_timeout_ms", keepalive_ms),  # a minute else, whatever the one above says
            # Clients may ping as often without being hung up on. Both may ping between calls, too: else the
            # connection of a client that vanished there would stay for ever.
            ("grpc.http2.min_ping_interval_without_data_ms", keepalive_ms // 2),
            ("grpc.keepalive_permit_without_calls", 1),
        ],
    )
    keyed = KeyedCalls(idempotency, metrics)
    generation = GenerationService(
        service, metrics, authenticator=authenticator, keyed=keyed, leaving=leaving
    )
    servicer = GenerationServicer(generation, config, calls or OpenCalls())
    pb_grpc.add_GenerationServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection((SERVICE_NAME, HEALTH_NAME, reflection.SERVICE_NAME), server)
    host = f"[{config.host}]" if ":" in config.host else config.host
    address = f"{host}:{config.port}"
    if credentials is None:
        server.add_insecure_port(address)
    else:
        server.add_secure_port(address, credentials)
    return server


class GrpcThread:
    """A server in a thread of this process, until it is drained or the process ends.

    Args:
        config: where.
        make_service: called in the thread; the connections to cells belong to its event loop.
        metrics: count the calls.
        make_credentials: those of each server, to serve with TLS.
        authenticator: who is let in; everybody if None.
        idempotency: how answers are kept for retries; as by default if None.

    Raises:
        RuntimeError: if the port cannot be had.
    """

    def __init__(
        self,
        config: GrpcConfig,
        make_service: Callable[[], ApiService],
        metrics: FrontEndMetrics | None = None,
        make_credentials: Callable[[], grpc.ServerCredentials] | None = None,
        authenticator: Authenticator | None = None,
        idempotency: IdempotencyConfig | None = None,
    ) -> None:
        self._port = config.port
        started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._leaving = asyncio.Event()
        self._calls = OpenCalls()
        self._servers: list[grpc.aio.Server] = []  # one, and those that failed while their calls go on

        async def begun(service: ApiService) -> grpc.aio.Server:
            credentials = None if make_credentials is None else make_credentials()
            server = make_server(
                config, service, metrics, credentials, authenticator, idempotency, self._leaving, self._calls
            )
            await server.start()
            self._servers.append(server)
            if self._leaving.is_set():  # meanwhile: only those before were stopped
                await server.stop(None)
            return server

        async def serve() -> None:
            try:
                service = make_service()
                service.connect()
                server = await begun(service)
            except Exception as error:
                started.set_exception(error)
                return
            started.set_result(asyncio.get_running_loop())
            emptied: set[asyncio.Task[None]] = set()
            while (failure := await _failure(server)) is not None:
                emptied.add(task := asyncio.create_task(self._empty(server)))
                task.add_done_callback(emptied.discard)
                if self._leaving.is_set():
                    break
                # It does so on a call whose method is no UTF-8, whoever sends that (grpcio 1.85).
                _log.error("the gRPC server failed; another takes its place: %r", failure)
                server = await begun(service)
            await asyncio.gather(*emptied)

        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._ended.set_running_or_notify_cancel()  # who no longer waits for it does not cancel it

        def run() -> None:
            try:
                asyncio.run(serve())
            finally:
                self._ended.set_result(None)

        threading.Thread(target=run, name="grpc", daemon=True).start()
        self._loop = started.result(_START_TIMEOUT_S)

    def turn_new_connections_away(self) -> None:
        """Let none begin, while those made before are served (see `deployments.listening`).

        Raises:
            OSError: the sockets take no filter (Linux's do).
        """
        for listener in listening_sockets(self._port):
            with listener:
                turn_new_connections_away(listener)

    async def drain(self, timeout_s: float) -> None:
        """Take no new calls, and let those there are end within `timeout_s`; then they are told, and end."""
        stop = self._stop(timeout_s)
        try:
            self._loop.call_soon_threadsafe(self._leaving.set)
            stopping = asyncio.run_coroutine_threadsafe(stop, self._loop)
        except RuntimeError:  # the loop is closed: it has ended with the server
            stop.close()
            return
        # The loop ends with the server, and may take the answer along, or not even hear of the call.
        answer, ended = asyncio.wrap_future(stopping), asyncio.wrap_future(self._ended)
        await asyncio.wait({answer, ended}, timeout=timeout_s + 1.0, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if answer.done() and not answer.cancelled() and (error := answer.exception()):
            _log.warning("gRPC calls were not ended in order: %r", error)

    async def _stop(self, timeout_s: float) -> None:
        stops = [server.stop(timeout_s + TOLD_S) for server in self._servers]
        stopping = asyncio.gather(*stops)
        await asyncio.wait({stopping}, timeout=timeout_s)
        if not stopping.done():
            self._calls.cut_off()
        await stopping

    async def _empty(self, server: grpc.aio.Server) -> None:
        """Let the calls of a server that failed end."""
        await server.stop(_ANY_TIME_S)
        self._servers.remove(server)


async def _failure(server: grpc.aio.Server) -> BaseException | None:
    """What a server failed with, as soon as it has; None once it was stopped."""

    async def end() -> None:
        while await server.wait_for_termination(_LOOK_S):
            pass

    ending = asyncio.ensure_future(end())
    await asyncio.wait({ending})
    return ending.exception()
