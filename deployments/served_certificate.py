"""The certificate that a front end serves HTTPS and gRPC with, which is renewed while it serves."""

from __future__ import annotations

import logging
import ssl
import threading
from typing import Any

import grpc

from cluster.http_config import HttpConfig
from deployments.certificates import certificate_warnings, read_certificate
from deployments.file_stamps import file_stamp

_log = logging.getLogger(__name__)

#: How often the files are looked at, in seconds.
_LOOK_S = 1.0


class _Renewed(ssl.SSLContext):
    """Servers are given one context for all their connections: each begins with that of the moment."""

    served: ServedCertificate

    @classmethod
    def of(cls, served: ServedCertificate) -> _Renewed:
        context = cls(ssl.PROTOCOL_TLS_SERVER)
        context.served = served
        return context

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """How asyncio and uvloop begin TLS on a connection."""
        return self.served.current_context.wrap_bio(*args, **kwargs)


class ServedCertificate:
    """A certificate with its key; each new connection gets those that the files held last.

    Files that cannot be used, half-written ones for example, change nothing, and the log says what is wrong.
    Certificate and key are files of their own, and whoever renews them writes one after the other: they are
    read once they have stayed as they are from one look to the next.

    Args:
        http: names the files.
        for_grpc: gRPC serves with them as well, whose library takes fewer of them.

    Raises:
        ValueError: if they cannot be used at first.
    """

    def __init__(self, http: HttpConfig, *, for_grpc: bool = False) -> None:
        self._http, self._has_grpc = http, for_grpc
        self._tried = self._seen = self._stamps()
        self._loaded = read_certificate(http, for_grpc=for_grpc)
        self.ssl_context: ssl.SSLContext = _Renewed.of(self)

    @property
    def current_context(self) -> ssl.SSLContext:
        """That of connections which begin now."""
        return self._loaded.context

    @property
    def expires_at(self) -> float:
        """When the first of the certificates that are served now expires, in Unix time."""
        return self._loaded.expires_at

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For one gRPC server."""
        served = self._loaded

        def changed() -> Any:  # its stub knows no None
            """Called by gRPC for every connection; None keeps what it has."""
            nonlocal served
            if served is self._loaded:
                return None
            served = self._loaded
            return served.for_grpc

        asks_clients = self._http.tls_client_ca is not None
        return grpc.dynamic_ssl_server_credentials(served.for_grpc, changed, asks_clients)

    def watch(self) -> None:
        """Look at the files from a thread, until the process ends."""

        def looking() -> None:
            wait = threading.Event().wait
            while not wait(_LOOK_S):
                self.look()

        threading.Thread(target=looking, name="certificate", daemon=True).start()

    def look(self) -> None:
        """Take what the files hold if they have changed, but not since the last look."""
        stamps, before = self._stamps(), self._seen
        self._seen = stamps
        if stamps != before or stamps == self._tried:
            return
        self._tried = stamps
        try:
            self._loaded = read_certificate(self._http, for_grpc=self._has_grpc)
            warnings = certificate_warnings(self._http)
        except (ValueError, OSError) as error:  # OSError where they change while they are read
            _log.error("the certificate that was served until now stays: %s", error)
            return
        _log.info("the certificate of %s is served from now on", self._http.tls_certificate)
        for warning in warnings:
            _log.warning("%s", warning)

    def _stamps(self) -> list[Any]:
        http = self._http
        return [file_stamp(path) for path in (http.tls_certificate, http.tls_key, http.tls_client_ca)]
