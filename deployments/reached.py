"""At which address clients reach a system, whichever machine of a Ray cluster its front ends are on."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass

import ray
from ray import serve
from ray.exceptions import RayError
from ray.util import get_node_ip_address

from cluster.members import Member
from deployments.directory import DIRECTORY_NAME, ask
from deployments.exposure import is_loopback
from deployments.names import APP_NAME
from deployments.preflight import StartError

# Addresses that stand for every one of a machine, and how its own processes call it.
_EVERY = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}
#: What only the head of a cluster has.
_HEAD = "node:__internal_head__"
# They report four times a second.
_HEARD_WITHIN_S = 30.0
_POLL_S = 0.2


@dataclass(frozen=True)
class Places:
    """Which machines listen to clients, by their addresses.

    Attributes:
        here: the machine of this process.
        front_ends: those of the front ends, once each.
        head: that of Ray Serve's proxy.
    """

    here: str
    front_ends: tuple[str, ...]
    head: str

    @classmethod
    def now(cls) -> Places:
        """As they are, asked of Ray and of the directory; by a process that is connected to Ray."""
        nodes = [node for node in ray.nodes() if node["Alive"]]
        here = get_node_ip_address()
        heads = [str(node["NodeManagerAddress"]) for node in nodes if _HEAD in node["Resources"]]
        head = heads[0] if heads else here
        if {node["NodeManagerAddress"] for node in nodes} == {here}:
            return cls(here, (here,), head)
        return cls(here, _front_ends(), head)

    def reached_at(self, section: str, host: str, *, is_direct: bool) -> str:
        """Where clients find what listens at `host`: on this machine, if there is some on it.

        Args:
            section: of the configuration, that names the host.
            host: as configured.
            is_direct: whether front ends listen, and not Ray Serve's proxy.

        Raises:
            StartError: if that is an address of each machine's own, and nobody listens on this one.
        """
        there = self.front_ends if is_direct else (self.head,)
        if self.here in there or not there:
            return _EVERY.get(host, host)
        if host in _EVERY:
            return there[0]
        if not is_loopback(host):
            return host
        who, remedy = "proxy is", "run `flotilla serve` there"
        if is_direct:
            own = f'{{"node:{self.here}": 0.001}}'
            who = "front ends are"
            remedy = (
                f"keep them on this one by `scaling: {{front_ends: {{placement: {{resources: {own}}}}}}}`"
            )
        raise StartError(
            f"nobody on this machine reaches this server: its {who} on {' and '.join(there)}, and "
            f"{section}.host is {host}, which is each machine's own; {remedy}, or set {section}.host to "
            "0.0.0.0, for clients on any machine (docs/security.md)"
        )


def _front_ends() -> tuple[str, ...]:
    """Machines of front ends that the directory has heard of; empty if it does not hear of any."""
    directory = serve.get_deployment_handle(DIRECTORY_NAME, APP_NAME)
    deadline = time.monotonic() + _HEARD_WITHIN_S
    while time.monotonic() < deadline:
        with suppress(TimeoutError, RayError):  # it may be replaced meanwhile
            members: list[Member] = asyncio.run(ask(directory, "members"))
            found = dict.fromkeys(member.node for member in members if member.kind == "front_end")
            if found:
                return tuple(found)
        time.sleep(_POLL_S)
    return ()
