"""Who can reach a system: where it listens beyond this machine, without keys or TLS; and its certificates."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Sequence
from pathlib import Path

import grpc

from cluster.config import FlotillaConfig
from cluster.http_config import HttpConfig
from cluster.members import Member


def is_loopback(host: str) -> bool:
    """Whether only clients on the same machine reach an address; a name but localhost may be anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def exposure_warnings(config: FlotillaConfig, *, wants_keys: bool) -> list[str]:
    """What people should know before others find out."""
    open_hosts = {
        name: section.host
        for name, section, is_on in (
            ("http.host", config.http, True),
            ("grpc.host", config.grpc, config.grpc.enabled),
            ("metrics.host", config.metrics, config.metrics.port is not None),
        )
        if is_on and not is_loopback(section.host)
    }
    warnings = []
    api = {name: host for name, host in open_hosts.items() if name != "metrics.host"}
    if api and not wants_keys:
        where = " and ".join(f"{name} {host}" for name, host in api.items())
        warnings.append(
            f"ANYBODY who can connect to {where} can use this server: there are no API keys. Make one with "
            "`flotilla keys create` and set `security.keys_file`, or set FLOTILLA_API_KEY (docs/security.md)"
        )
    if api and wants_keys and config.http.tls_certificate is None:
        warnings.append(
            f"API keys and prompts travel in the clear to {' and '.join(api.values())}: set "
            "`http.tls_certificate` and `http.tls_key`, or have a proxy in front serve HTTPS"
        )
    if "metrics.host" in open_hosts:
        warnings.append(
            f"metrics are served to anybody on {config.metrics.host}:{config.metrics.port}: that port has no "
            "keys"
        )
    return warnings


def check_certificate(http: HttpConfig) -> None:
    """Raise ValueError if the certificate or its key cannot be used."""
    if http.tls_certificate is None or http.tls_key is None:
        return
    _check_pem(http.tls_certificate, "CERTIFICATE-----", "http.tls_certificate", "certificate")
    _check_pem(http.tls_key, "PRIVATE KEY-----", "http.tls_key", "private key")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            http.tls_certificate, http.tls_key, password=lambda: _refused(http.tls_key)
        )
    except OSError as error:  # SSLError is one
        raise ValueError(
            f"http.tls_certificate {http.tls_certificate} and http.tls_key {http.tls_key} cannot be used "
            f"together: {error}"
        ) from None


def _check_pem(path: Path, mark: str, field: str, what: str) -> None:
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        raise ValueError(f"there is no {path}") from None
    except OSError as error:  # often a key that only root may read
        raise ValueError(f"{field}: cannot read {path}: {error.strerror}") from None
    if mark not in text:
        raise ValueError(f"{field}: {path} holds no {what} in PEM")


def _refused(path: Path | None) -> str:
    """Nobody is there to be asked for a pass phrase."""
    raise ValueError(f"http.tls_key: {path} is encrypted; it must be a key without a pass phrase")


def grpc_credentials(http: HttpConfig) -> grpc.ServerCredentials | None:
    """Those of the gRPC server, which are HTTP's; None without TLS."""
    if http.tls_certificate is None or http.tls_key is None:
        return None
    pair = (Path(http.tls_key).read_bytes(), Path(http.tls_certificate).read_bytes())
    return grpc.ssl_server_credentials([pair])


def num_front_ends(members: Sequence[Member]) -> int:
    """How many front ends take requests now; at least the one that asks."""
    return max(1, sum(member.kind == "front_end" and member.state == "ready" for member in members))
