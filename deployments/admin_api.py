"""`/admin/drafters`: the pool of drafters seen and changed while it serves. Off unless configured."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from cluster.drafter_config import DrafterConfig
from cluster.pool_errors import DrafterFailed, NotServing, PoolError, UnknownDrafter
from deployments.errors import ApiError, bad_request, from_validation, not_ready
from deployments.key_gate import grant_of

#: Every instance as of `cluster.lifecycle.Lifecycle.drafters`.
Instances = list[dict[str, Any]]
Read = Callable[[Request], Awaitable[bytes]]
_Answer = TypeVar("_Answer")
_Body = TypeVar("_Body")

_OF_PROXIES = ("forwarded", "via", "x-real-ip", *(f"x-forwarded-{what}" for what in ("for", "host", "proto")))
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
_DRAFTER: TypeAdapter[DrafterConfig] = TypeAdapter(DrafterConfig)


class PoolControl(Protocol):
    """What of a cell changes its pool of drafters (`cluster.cell.Cell`)."""

    async def drafters(self) -> Instances:
        """Every instance."""
        ...

    async def add_drafter(self, config: dict[str, Any]) -> Instances:
        """Add a kind; its instances once they are ready, or after a minute."""
        ...

    async def replace_drafter(self, config: dict[str, Any]) -> Instances:
        """Give a kind other weights or settings; its instances once the new ones serve, or after a minute."""
        ...

    async def scale_drafter(self, kind: str, replicas: int) -> Instances:
        """Have so many instances of a kind."""
        ...

    async def drain_drafter(self, name: str) -> Instances:
        """Remove it once nobody uses it."""
        ...

    async def remove_drafter(self, name: str) -> None:
        """Remove it now."""
        ...


class Scale(BaseModel):
    """Body of `PATCH /admin/drafters/{kind}`."""

    model_config = ConfigDict(extra="forbid")
    replicas: int = Field(ge=1, le=64, strict=True)


_SCALE = TypeAdapter(Scale)


def add_admin_routes(app: FastAPI, pool: PoolControl | None, read: Read) -> None:
    """Add the routes; without a pool they answer 404 and say how to change that.

    Args:
        app: gets them.
        pool: what they change.
        read: a request's body, bounded; one that is not announced as JSON is refused.
    """

    def admitted(request: Request) -> PoolControl:
        if pool is None:
            raise ApiError(
                404,
                "Drafters cannot be changed on this server. To allow it from the same machine, start it with "
                "a configuration that has `http: {admin: true}`.",
                code="admin_disabled",
            )
        grant = grant_of(request.scope)
        if grant is None or grant.key is None:
            _check_local(request)
        return pool

    @app.get("/admin/drafters")
    async def drafters(request: Request) -> Response:
        """Every drafter instance: its state, load, restarts and node."""
        return _listed(await _told(admitted(request).drafters()))

    @app.post("/admin/drafters")
    async def add(request: Request) -> Response:
        """Add a drafter, given as in the configuration file: 201 once it serves, 202 while it loads."""
        control = admitted(request)
        config = await _body_as(_DRAFTER, request, read)
        instances = await _told(control.add_drafter(config.model_dump(mode="json")))
        return _listed(instances, status=_status(instances, 201))

    @app.put("/admin/drafters/{kind}")
    async def replace(kind: str, request: Request) -> Response:
        """Other weights or settings for a kind: 200 once the new instances serve and the old ones drain."""
        control = admitted(request)
        config = await _body_as(_DRAFTER, request, read)
        if config.name != kind:
            raise bad_request(f"`name` must be '{kind[:80]}', as in the path: nobody is renamed.", "name")
        instances = await _told(control.replace_drafter(config.model_dump(mode="json")))
        return _listed(instances, status=_status(instances, 200))

    @app.patch("/admin/drafters/{kind:path}")
    async def scale(kind: str, request: Request) -> Response:
        """Have `replicas` instances of a kind; those too many are drained."""
        control = admitted(request)
        wish = await _body_as(_SCALE, request, read)
        instances = await _told(control.scale_drafter(kind, wish.replicas))
        return _listed(instances, status=_status(instances, 200))

    @app.delete("/admin/drafters/{name:path}")
    async def remove(name: str, request: Request) -> Response:
        """Remove an instance, or all of a kind: at once, or with `drain=true` once nobody uses it."""
        control = admitted(request)
        drain = request.query_params.get("drain", "false")
        if drain not in ("true", "false"):
            raise bad_request("`drain` must be true or false.", "drain")
        if drain == "true":
            return _listed(await _told(control.drain_drafter(name)), status=202)
        await _told(control.remove_drafter(name))
        body = {"object": "drafter.deleted", "name": name, "deleted": True}
        return Response(msgspec.json.encode(body), media_type="application/json")


def _check_local(request: Request) -> None:
    """Without API keys nobody but people on this machine: there is no other authentication.

    A page in a browser on this machine is somebody else: it is known by the name it resolves to loopback,
    and can send no JSON, and nothing else is read, to another origin without being asked.
    """
    host = request.client.host if request.client is not None else ""
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    named = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host", "")
    forwarded = any(name in request.headers for name in _OF_PROXIES)
    if not is_local or forwarded or named.lower() not in _LOCAL_NAMES:
        raise ApiError(
            403,
            "Without API keys `/admin` answers only to clients on the server's own machine, by a loopback "
            "address and without a proxy. Log in there, or forward the port (`ssh -L`, "
            "`kubectl port-forward`).",
            code="admin_not_local",
        )


async def _body_as(kind: TypeAdapter[_Body], request: Request, read: Read) -> _Body:
    try:
        return kind.validate_json(await read(request))
    except ValidationError as error:
        raise from_validation(error, tag="kind" if kind is _DRAFTER else None) from error


async def _told(call: Awaitable[_Answer]) -> _Answer:
    """What the cell answers; what it refuses becomes an error for the client."""
    try:
        return await call
    except Exception as error:  # a remote call: anything may come out of it
        cause = getattr(error, "cause", None) or error
        if isinstance(cause, UnknownDrafter):
            raise ApiError(404, _sentence(cause), param="name", code="drafter_not_found") from error
        if isinstance(cause, DrafterFailed):
            raise bad_request(_sentence(cause), code="drafter_failed") from error
        if isinstance(cause, NotServing):
            raise not_ready(_sentence(cause)) from error
        if isinstance(cause, PoolError):
            raise ApiError(409, _sentence(cause), code="pool_conflict") from error
        raise not_ready("The model does not answer.") from error


def _sentence(error: PoolError) -> str:
    text = str(error.args[0])
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def _status(instances: Instances, done: int) -> int:
    return 202 if any(one["state"] == "loading" for one in instances) else done


def _listed(instances: Instances, status: int = 200) -> Response:
    body = {"object": "list", "data": instances}
    return Response(msgspec.json.encode(body), status, media_type="application/json")
