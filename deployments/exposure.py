"""Who can reach a system: where it listens beyond this machine, without keys or TLS."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from cluster.config import FlotillaConfig
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
    where = " and ".join(f"{name} {host}" for name, host in open_hosts.items() if name != "metrics.host")
    if where and not wants_keys and config.http.tls_client_ca is None:
        warnings.append(
            f"ANYBODY who can connect to {where} can use this server: there are no API keys. Make one with "
            "`flotilla keys create` and set `security.keys_file`, or set FLOTILLA_API_KEY (docs/security.md)"
        )
    if where and wants_keys and config.http.tls_certificate is None:
        warnings.append(
            f"API keys and prompts travel in the clear to {where}; set `http.tls_certificate` and "
            "`http.tls_key`, or have a proxy in front serve HTTPS"
        )
    if "metrics.host" in open_hosts:
        warnings.append(
            f"metrics are served to anybody on {config.metrics.host}:{config.metrics.port}: that port has no "
            "keys"
        )
    return warnings


def num_front_ends(members: Sequence[Member]) -> int:
    """How many front ends take requests now; at least the one that asks."""
    return max(1, sum(member.kind == "front_end" and member.state == "ready" for member in members))
