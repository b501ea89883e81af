"""Starting the gRPC service with the system: the options of Serve's proxy, and waiting until it answers."""

from __future__ import annotations

import ssl
import time
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.grpc_config import GrpcConfig
from deployments.names import APP_NAME
from deployments.preflight import StartError

_POLL_S = 0.1

#: Serve's proxy needs to be told which application is meant as soon as there are several.
METADATA = (("application", APP_NAME),)


def grpc_options(config: GrpcConfig) -> dict[str, Any]:
    """What `serve.start` is told where its proxy serves gRPC."""
    from deployments.grpc_proxy import SERVICER_FUNCTIONS

    return {
        "port": config.port,
        "grpc_servicer_functions": SERVICER_FUNCTIONS,
        "request_timeout_s": config.default_deadline_s,
        "enable_reflection": True,
    }


def shown_address(host: str, port: int) -> str:
    """Where clients connect, as gRPC takes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def await_grpc(address: str, within_s: float = 60.0, *, has_tls: bool = False) -> None:
    """Wait until the service says that it serves; raises `StartError` if it does not in time.

    With TLS, until it shows its certificate: that need not name the address by which it is asked here.
    """
    if has_tls:
        await_certificate(address, "gRPC", within_s)
        return
    deadline = time.monotonic() + within_s
    with grpc.insecure_channel(address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)  # its methods have no types
        while True:
            try:
                answer = health.Check(health_pb2.HealthCheckRequest(), timeout=5, metadata=METADATA)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                reason = "it says that it does not serve"
            except grpc.RpcError as error:
                reason = str(error.details())
            if time.monotonic() > deadline:
                raise StartError(f"gRPC on {address} does not answer: {reason}")
            time.sleep(_POLL_S)


def await_certificate(address: str, what: str, within_s: float = 60.0) -> None:
    """Wait until a server shows a certificate, any one; raises `StartError` if it does not in time."""
    deadline = time.monotonic() + within_s
    host, _, port = address.rpartition(":")
    while True:
        try:
            ssl.get_server_certificate((host.strip("[]"), int(port)), timeout=5)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise StartError(f"{what} on {address} does not answer with TLS: {error}") from None
        time.sleep(_POLL_S)
