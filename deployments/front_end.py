"""The Ray Serve deployment that answers HTTP."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import uvicorn
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.util import get_node_ip_address

from cluster.config import FlotillaConfig
from cluster.log_files import log_to_files
from cluster.members import Member
from cluster.mirrored_log import IS_SHOWN
from cluster.model_paths import model_directory
from cluster.process_environment import take_on
from cluster.served_target import served_target
from deployments.admin_api import Instances
from deployments.api_service import ApiService
from deployments.arriving import cells_serve
from deployments.authentication import Authenticator
from deployments.cell_client import Endpoint
from deployments.certificates import certificate_warnings
from deployments.console import ConsoleState
from deployments.directory import DirectoryClient, ListedCells
from deployments.exposure import exposure_warnings, num_front_ends
from deployments.farewell import Farewell
from deployments.front_end_metrics import FrontEndMetrics
from deployments.grpc_replica import GrpcReplica
from deployments.grpc_server import GrpcThread
from deployments.grpc_service import GenerationService
from deployments.http_limits import server_config
from deployments.leaving import a_cell_stays, streams_end
from deployments.listening import shared_listener, turn_new_connections_away
from deployments.metric_gathering import Gatherer, serve_metrics
from deployments.metric_server import MetricServer
from deployments.open_calls import TOLD_S, OpenCalls
from deployments.openai_api import create_app
from deployments.request_log import log_fields
from deployments.sampling_defaults import OPENAI_SAMPLING, SamplingDefaults
from deployments.served_certificate import ServedCertificate
from deployments.supervising import identity
from deployments.text_codec import TextCodec
from deployments.tracing import trace_requests

_log = logging.getLogger(__name__)

# An event loop that has not turned for so long is stuck.
_STUCK_S = 20.0

#: For so long before it stops, a front end asks its clients to close their connections.
_FAREWELL_S = 1.0

#: Then it lets no connection begin for so long, while those made before are accepted and send their requests.
_LAST_REQUESTS_S = 0.8


class CellHandle:
    """The cell's control calls through Ray Serve; the tokens travel by `CellClients` instead."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def endpoint(self) -> Endpoint:
        """See `CellControl`."""
        host, port, token = await self._handle.endpoint.remote()
        return host, port, token

    async def describe(self) -> Mapping[str, Any]:
        """See `CellControl`."""
        description: Mapping[str, Any] = await self._handle.describe.remote()
        return description

    async def metrics(self) -> str:
        """See `CellControl`."""
        text: str = await self._handle.metrics.remote()
        return text

    async def decisions(self, limit: int) -> bytes | None:
        """See `CellControl`."""
        lines: bytes | None = await self._handle.decisions.remote(limit)
        return lines

    async def timeline(self) -> bytes | None:
        """See `CellControl`."""
        trace: bytes | None = await self._handle.timeline.remote()
        return trace

    async def workers(self) -> list[dict[str, Any]]:
        """See `CellControl`."""
        found: list[dict[str, Any]] = await self._handle.workers.remote()
        return found


class PoolHandle:
    """The cell's pool of drafters through Ray Serve."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def drafters(self) -> Instances:
        """See `PoolControl`."""
        found: Instances = await self._handle.drafters.remote()
        return found

    async def add_drafter(self, config: dict[str, Any]) -> Instances:
        """See `PoolControl`."""
        found: Instances = await self._handle.add_drafter.remote(config)
        return found

    async def replace_drafter(self, config: dict[str, Any]) -> Instances:
        """See `PoolControl`."""
        found: Instances = await self._handle.add_drafter.remote(config, replace=True)
        return found

    async def scale_drafter(self, kind: str, replicas: int) -> Instances:
        """See `PoolControl`."""
        found: Instances = await self._handle.scale_drafter.remote(kind, replicas)
        return found

    async def drain_drafter(self, name: str) -> Instances:
        """See `PoolControl`."""
        found: Instances = await self._handle.drain_drafter.remote(name)
        return found

    async def remove_drafter(self, name: str) -> None:
        """See `PoolControl`."""
        await self._handle.remove_drafter.remote(name)


@serve.ingress()
class FrontEnd(GrpcReplica):
    """One replica: tokenizer, API, and connections to the cells."""

    def __init__(self, config: dict[str, Any], cell: DeploymentHandle, directory: DeploymentHandle) -> None:
        take_on()
        self._config = FlotillaConfig.model_validate(config)
        self._cell = cell
        target = self._config.target
        self._codec = TextCodec.load(
            model_directory(target.path),
            trust_remote_code=target.trust_remote_code,
            variables=target.chat_template_kwargs,
        )
        self._sampling = OPENAI_SAMPLING
        if target.sampling_defaults == "model":
            self._sampling = SamplingDefaults.of_model(model_directory(target.path))
        self._id = serve.get_replica_context().replica_id.unique_id
        self._identity = identity()
        self._services: list[ApiService] = []
        self._is_starting, self._is_draining = True, False
        self._server: uvicorn.Server | None = None
        self._calls = OpenCalls()  # over HTTP
        log_to_files(self._config.log, {"front_end": self._id}, log_fields)
        self._tracer = trace_requests(self._config.telemetry, self._id)
        self._certificate = self._served_certificate()
        self._metrics = FrontEndMetrics(
            self._id,
            self._num_resubmitted,
            self._num_silent,
            self._num_rejected,
            self._config.tiers,
            lambda: 0.0 if self._certificate is None else self._certificate.expires_at,
        )
        self._metric_server = MetricServer(
            self._metrics.set, get_node_ip_address(), refresh=self._metrics.refresh
        )
        self._directory = DirectoryClient(directory, self.member)
        self._directory.start()
        self._authenticator = Authenticator(
            self._config.security,
            max_open=self._config.http.max_open_requests,
            replicas=lambda: num_front_ends(self._directory.members),
        )
        warnings = exposure_warnings(self._config, wants_keys=self._authenticator.wants_keys)
        for warning in warnings + certificate_warnings(self._config.http):
            _log.warning("%s", warning, extra=IS_SHOWN)
        self._gatherer = Gatherer(self._metrics, lambda: self._directory.members)
        self._service = self._make_service()

    def _served_certificate(self) -> ServedCertificate | None:
        if self._config.http.tls_certificate is None:
            return None
        certificate = ServedCertificate(self._config.http, for_grpc=self._config.grpc.enabled)
        if self._config.http.direct or self._config.grpc.enabled:  # Serve's proxy reads the files only once
            certificate.watch()
        return certificate

    def member(self) -> Member:
        """The front end as the directory shall know it."""
        streams = sum(service.client.num_streams for service in self._services)
        return Member(
            kind="front_end",
            id=self._id,
            node=get_node_ip_address(),
            metrics_url=self._metric_server.url,
            stats={"streams": float(streams)},
            state="draining" if self._is_draining else "starting" if self._is_starting else "ready",
            details=self._identity,
        )

    async def check_health(self) -> None:
        """Raise if a thread that answers HTTP or gRPC has not looked after its connections for long."""
        for service in self._services:
            service.client.check(_STUCK_S)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Ray Serve passes to `deployments.autoscaling`."""
        return self.member().stats

    async def configuration(self) -> dict[str, Any]:
        """What it was started with; whoever changes it asks first (`deployments.rollout`)."""
        return self._config.model_dump(mode="json")

    def _make_service(self) -> ApiService:
        """The API with connections of its own to the cells, for one event loop."""
        cells = ListedCells(
            lambda: self._directory.members,
            served_target(self._config.target),
            is_leaving=lambda: self._is_draining,
        )
        service = ApiService(
            CellHandle(self._cell),
            self._codec,
            tiers=self._config.tiers,
            cells=cells,
            tool_parser=self._config.target.tool_parser,
            reasoning_parser=self._config.target.reasoning_parser,
            silent_s=self._config.health.silent_s,
            give_up_after_s=self._config.health.cell_wait_s,
            sampling=self._sampling,
        )
        self._services.append(service)
        return service

    def _num_resubmitted(self) -> int:
        return sum(service.client.num_resubmitted for service in self._services)

    def _num_silent(self) -> int:
        return sum(service.client.num_silent for service in self._services)

    def _num_rejected(self) -> Counter[tuple[str, str]]:
        # Copied each: the thread of its event loop goes on counting.
        return sum((service.client.num_rejected.copy() for service in self._services), Counter())

    def _make_app(
        self, service: ApiService, *, sends_request_id: bool = True, calls: OpenCalls | None = None
    ) -> FastAPI:
        return create_app(
            service,
            max_body_bytes=self._config.http.max_body_bytes,
            sends_request_id=sends_request_id,
            pool=self._pool(),
            metrics=self._metrics,
            gatherer=self._gatherer if self._config.metrics.port is None else None,
            authenticator=self._authenticator,
            read_timeout_s=self._config.http.read_timeout_s,
            request_timeout_s=self._config.http.request_timeout_s,
            idempotency=self._config.idempotency,
            ignores_unknown_fields=self._config.http.unknown_fields == "ignore",
            allowed_origins=self._config.http.allowed_origins,
            calls=calls,
            console=ConsoleState(
                service,
                self._gatherer.exposition,
                lambda: self._directory.members,
                PoolHandle(self._cell).drafters,
            ),
        )

    def _pool(self) -> PoolHandle | None:
        return PoolHandle(self._cell) if self._config.http.admin else None

    def _begin_to_listen(self) -> None:
        if self._config.http.direct:
            self._listen()
        self._listen_grpc()
        if self._config.metrics.port is not None:
            serve_metrics(self._gatherer, self._config.metrics.host, self._config.metrics.port)

    def _listen(self) -> None:
        """Serve HTTP from a thread of this replica: each token is spared the way through Serve's proxy.

        Replicas of one node share the port; the kernel spreads connections over them.
        """
        http = self._config.http
        self._listener = shared_listener(http.host, http.port)
        # Not the service that Serve's own loop uses: tokens put into a queue of another thread's loop are
        # seen only when that loop happens to wake, which uvicorn's does every 100 ms.
        app = self._make_app(self._make_service(), calls=self._calls)
        context = None if self._certificate is None else self._certificate.ssl_context
        app.add_middleware(Farewell, is_leaving=lambda: self._is_draining)
        config = server_config(app, http, context, goes_on=self._another_stays)
        server = self._server = uvicorn.Server(config)
        self._http = threading.Thread(target=server.run, args=([self._listener],), name="http", daemon=True)
        self._http.start()

    async def __del__(self) -> None:
        """Called by Ray Serve when the replica is removed: open streams end, new ones go elsewhere."""
        if not hasattr(self, "_service") or self._is_draining:  # its constructor may have failed
            return
        scaling = self._config.scaling
        most_s = scaling.front_ends.drain_timeout_s
        self._is_draining = True
        if self._server is not None:
            # Clients with open connections are told to make new ones, which go to those who stay.
            await asyncio.sleep(_FAREWELL_S)
        with suppress(OSError):  # where sockets take no filter, those that come now may be reset
            await self._turn_new_connections_away()
        if self._server is not None:
            self._server.should_exit = True
        grpc = asyncio.ensure_future(self._drain_grpc(most_s))
        await streams_end(
            lambda: self._answers_http() or not grpc.done(),
            self._a_cell_stays,
            least_s=scaling.cells.drain_timeout_s,
            most_s=most_s,
        )
        await asyncio.gather(grpc, self._drain_grpc(0.0), self._cut_off_http())
        await self._directory.leave()
        if self._tracer is not None:  # Ray ends the process as it is
            await self._tracer.leave()

    async def _cut_off_http(self) -> None:
        """Whoever still waits for an answer is told why there is no more of it."""
        if self._answers_http():
            self._calls.cut_off_from_outside()
            await streams_end(self._answers_http, lambda: True, least_s=TOLD_S, most_s=TOLD_S)

    async def _turn_new_connections_away(self) -> None:
        if self._server is not None:
            turn_new_connections_away(self._listener)
        if (grpc := getattr(self, "_grpc", None)) is not None:
            grpc.turn_new_connections_away()
        if self._server is not None or grpc is not None:
            await asyncio.sleep(_LAST_REQUESTS_S)

    def _a_cell_stays(self) -> bool:
        return a_cell_stays(self._directory, self._can_serve)

    def _can_serve(self) -> bool:
        return any(service.client.can_serve for service in list(self._services))

    def _another_stays(self) -> bool:
        """Whether some front end does not go: where all do, the system stops, and cells hear of it last."""
        return any(one.kind == "front_end" and one.state != "draining" for one in self._directory.members)

    def _answers_http(self) -> bool:
        return self._server is not None and self._http.is_alive()

    def _listen_grpc(self) -> None:
        """Serve gRPC from a thread likewise, or through Serve's proxy."""
        self._grpc: GrpcThread | None = None
        if self._config.grpc.enabled and self._config.grpc.direct:
            self._grpc = GrpcThread(
                self._config.grpc,
                self._make_service,
                self._metrics,
                None if self._certificate is None else self._certificate.grpc_credentials,
                self._authenticator,
                self._config.idempotency,
            )
        self.grpc_service = GenerationService(
            self._service, self._metrics, behind_proxy=True, authenticator=self._authenticator
        )
        self.grpc_deadline_s = self._config.grpc.default_deadline_s

    async def _drain_grpc(self, timeout_s: float) -> None:
        if (grpc := getattr(self, "_grpc", None)) is not None:
            await grpc.drain(timeout_s)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray Serve after the constructor; the front end counts as there once it has returned."""
        await cells_serve(self._directory, self._id, served_target(self._config.target))
        if not self._is_draining:  # else removed meanwhile: it would take requests and not end
            self._begin_to_listen()
        self._is_starting = False
        # Serve's proxy sends the header itself, with the id it also passes in.
        return self._make_app(self._service, sends_request_id=False)
