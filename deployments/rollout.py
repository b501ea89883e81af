"""Another configuration or version for a system that serves, without a request that fails.

Ray Serve replaces cells and front ends, and starts who comes before it stops who goes. A cell that comes
counts as there once it serves; one that goes gives its requests to the others (docs/reliability.md).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from cluster.config import FlotillaConfig
from cluster.members import Member
from cluster.served_target import FIELDS
from deployments.application import APP_NAME, build_app, why_failed
from deployments.directory import DIRECTORY_NAME, ask

_POLL_S = 0.5
_CALL_TIMEOUT_S = 10.0
_SILENCE_S = 60.0
#: Between the end of a lost replica and the start of the next Ray Serve makes nothing for a moment.
_GIVEN_UP_S = 5.0

#: Settings by which clients and requests under way know the system; others may change.
_FIXED = (
    *(f"target.{field}" for field in FIELDS),
    "http.host",
    "http.port",
    "http.direct",
    "http.tls_certificate",
    "http.tls_client_ca",
    "grpc.enabled",
    "grpc.direct",
    "grpc.host",
    "grpc.port",
    "metrics.host",
    "metrics.port",
)
_PORTS = ("http.port", "grpc.port")
#: What Ray Serve calls an application of which something failed.
_FAILURES = ("DEPLOY_FAILED", "UNHEALTHY")
#: How it says that replicas wait for a machine.
_LACKING = re.compile(r"required for each replica: (\{.*?\}), total resources available: (\{.*?\})")


class RolloutError(Exception):
    """The change cannot be made while the system serves; the message says why, and what to do instead."""


@dataclass(frozen=True)
class Progress:
    """How far a rollout has come.

    Attributes:
        status: Ray Serve's: "DEPLOYING", "RUNNING", "DEPLOY_FAILED", ...
        message: why, where something failed.
        members: cells and front ends.
        old: ids of those that were there before the rollout.
        unplaced: for what new ones wait that no machine has room for, for people; empty if none does.
    """

    status: str
    message: str
    members: tuple[Member, ...]
    old: frozenset[str]
    unplaced: str = ""

    @property
    def is_done(self) -> bool:
        """Whether all that serve are new."""
        new = [member for member in self.members if member.id not in self.old]
        serving = {member.kind for member in new if member.state == "ready"}
        return self.status == "RUNNING" and len(new) == len(self.members) and len(serving) == 2

    @property
    def has_failed(self) -> bool:
        """Whether Ray Serve gave up; who served before still does, and is not replaced when lost."""
        return self.status in _FAILURES

    @property
    def failure(self) -> str:
        """What that means, and why, for people."""
        return (
            "Ray Serve gave up. What served before still does, but is not replaced if it is lost: roll out "
            f"the former file. {self.message}"
        )

    def summary(self) -> str:
        """A line for people."""
        if not self.members:
            return "waiting for the directory of cells and front ends, which is replaced, too"
        parts = []
        for kind, name in (("cell", "cells"), ("front_end", "front ends")):
            found = [member for member in self.members if member.kind == kind]
            new = [member for member in found if member.id not in self.old]
            ready = sum(member.state == "ready" for member in new)
            parts.append(f"{name}: {ready} of {len(new)} new ready, {len(found) - len(new)} old left")
        return "; ".join(filter(None, (*parts, self.unplaced)))


def allowed(running: FlotillaConfig, wanted: FlotillaConfig, *, keeps_key: bool = True) -> FlotillaConfig:
    """The configuration to go to: as wanted, on the ports that are in use.

    Args:
        running: what serves.
        wanted: what is to serve.
        keeps_key: where nothing is said of `security.key_hash`, the one in use stays.

    Raises:
        RolloutError: if a setting changes that cannot while the system serves.
    """
    before, after = running.model_dump(), wanted.model_dump()
    for path in _PORTS:
        section, _, name = path.partition(".")
        after[section][name] = after[section][name] or before[section][name]
    if keeps_key and after["security"]["key_hash"] is None:
        after["security"]["key_hash"] = before["security"]["key_hash"]
    changed = [path for path in _FIXED if _at(before, path) != _at(after, path)]
    if changed:
        shown = ", ".join(
            f"{path} (is {_at(before, path)}, was to be {_at(after, path)})" for path in changed
        )
        raise RolloutError(
            f"these cannot change while the system serves: {shown}. Requests under way would end as others, "
            "or clients would not find it: start a second system, and move clients to it"
        )
    return FlotillaConfig.model_validate(after)


def begin(wanted: FlotillaConfig, *, keeps_key: bool = True) -> Iterator[Progress]:
    """Have the running system become as wanted; how far that has come, until it is done or has failed.

    The caller is connected to its Ray cluster. Who stops asking stops nothing. `keeps_key` is for who cannot
    know the key in the environment of `flotilla serve` (`allowed`).

    Raises:
        RolloutError: if nothing runs there, or a setting cannot change; nothing was begun then. Later, if
            Ray Serve has not told for a minute how far it is.
    """
    try:
        raw = _configuration()
        old = frozenset(member.id for member in asyncio.run(_members()))
    except Exception as error:  # a remote call: anything may come out of it
        raise RolloutError(
            f"no Flotilla serves on this Ray cluster, or it does not answer: {error}"
        ) from error
    config = allowed(FlotillaConfig.model_validate(raw), wanted, keeps_key=keeps_key)
    target = serve.RunTarget(target=build_app(config), name=APP_NAME)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    goes_on_at = time.monotonic()
    for application in _told():
        status = ApplicationStatus(application.status).value
        if status not in _FAILURES or _goes_on(application):
            goes_on_at = time.monotonic()
        if status in _FAILURES and time.monotonic() - goes_on_at < _GIVEN_UP_S:
            status = ApplicationStatus.DEPLOYING.value
        message = " ".join(filter(None, (application.message, why_failed(application))))
        members = _members_if_told()
        progress = Progress(status, message, members, old, _unplaced(application, members))
        yield progress
        if progress.is_done or progress.has_failed:
            return


def _configuration() -> dict[str, Any]:
    """Of what serves."""
    front_end = serve.get_deployment_handle("FrontEnd", APP_NAME)
    try:
        raw: dict[str, Any] = front_end.configuration.remote().result(timeout_s=_CALL_TIMEOUT_S)
    finally:
        # Else it tells Ray Serve of its calls for as long as the number of front ends is to follow the load,
        # also once this process has left Ray, which it would join again for that.
        front_end.shutdown()
    return raw


def _told() -> Iterator[ApplicationStatusOverview]:
    """What Ray Serve tells of the application, now and then.

    Its controller is made again when it dies, and goes on with what it was asked for.
    """
    heard = time.monotonic()
    while True:
        time.sleep(_POLL_S)
        try:
            application = serve.status().applications[APP_NAME]
        except Exception as error:  # a remote call: anything may come out of it
            if time.monotonic() - heard >= _SILENCE_S:
                raise RolloutError(
                    f"Ray Serve has not told for {_SILENCE_S:g} s how far it is: {error!r}. It goes on once "
                    "it is back; ask for the same again to see how far it has come"
                ) from error
            continue
        heard = time.monotonic()
        yield application


def _goes_on(application: ApplicationStatusOverview) -> bool:
    """Whether Ray Serve still makes what failed.

    It calls a deployment failed, too, of which a new replica was lost, until another is in its place and the
    old ones have ended.
    """
    failed = [one for one in application.deployments.values() if one.status in _FAILURES]
    return bool(failed) and all(
        one.status_trigger == "HEALTH_CHECK_FAILED"
        and any(count for state, count in one.replica_states.items() if state != "RUNNING")
        for one in failed
    )


def _unplaced(application: ApplicationStatusOverview, members: Sequence[Member]) -> str:
    """What is lacking where Ray Serve has tried for half a minute to place who is new; it goes on trying.

    It goes on saying so until they serve, so they are placed if as many tell of themselves as start.
    """
    told = []
    for name, kind in (("Cell", "cell"), ("FrontEnd", "front_end")):
        deployment = application.deployments.get(name)
        lacking = deployment and _LACKING.search(deployment.message)
        if not deployment or not lacking:
            continue
        placed = sum(member.kind == kind and member.state == "starting" for member in members)
        if sum(n for state, n in deployment.replica_states.items() if state == "STARTING") > placed:
            told.append(f"{name} waits for a machine with {lacking[1]}, of which {lacking[2]} is free")
    return "; ".join(told)


async def _members() -> list[Member]:
    directory = serve.get_deployment_handle(DIRECTORY_NAME, APP_NAME)
    members: list[Member] = await ask(directory, "members", timeout_s=_CALL_TIMEOUT_S)
    return members


def _members_if_told() -> tuple[Member, ...]:
    try:
        return tuple(asyncio.run(_members()))
    except (TimeoutError, RayError):  # the directory is replaced, too
        return ()


def _at(config: dict[str, Any], path: str) -> Any:
    section, _, name = path.partition(".")
    return config[section][name]
