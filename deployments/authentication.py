"""Who is let in: one authenticator of a front end, asked for every request over HTTP and gRPC alike."""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager

from cluster.security_config import KeyConfig, Permission, SecurityConfig
from cluster.stream_messages import NOBODY, Tenant
from deployments.answering import Call
from deployments.cell_client import RequestRejected
from deployments.errors import ApiError
from deployments.generation import Update
from deployments.key_store import KeyStore
from deployments.openai_schema import GenerationRequest
from deployments.presented_keys import PresentedKeys
from deployments.rate_limit import KeyLimiter, Refusal
from deployments.sampling_mapping import CellInfo, max_new_tokens, reckoned_tokens

# Requests of a key beyond its limit that may attach to its own answers; each takes one of all places.
MOST_ATTACHED = 16
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="flotilla"'}


class Grant:
    """A request that was let in, by a key or because no keys are wanted.

    Attributes:
        key: whose; None without keys.
        limiter: of the key, if it counts towards limits.
        refusal: what it is answered with, unless it attaches to an answer that is open already.
    """

    def __init__(self, authenticator: Authenticator, key: KeyConfig | None) -> None:
        self._authenticator = authenticator
        self.key = key
        self.limiter: KeyLimiter | None = None
        self.refusal: ApiError | None = None
        self._reserved = 0
        self._used = 0
        self._num_holders = 1

    @contextmanager
    def held(self) -> Iterator[None]:
        """It stays open within, also when its request ends: limits count it until its last holder is gone."""
        self._num_holders += 1
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        """One holder less; the request itself is one."""
        self._num_holders -= 1
        if not self._num_holders:
            self._authenticator.close(self)

    @property
    def tenant(self) -> Tenant:
        """Who competes with others for a cell; nobody is told apart where there is but one key."""
        return NOBODY if self.key is None else self._authenticator.tenant(self.key)

    def named(self, request_id: str) -> str:
        """The request id told from equal ones of other keys, who so cannot end each other's requests."""
        return request_id if self.key is None else f"{self.key.name}/{request_id}"

    def check_place(self) -> None:
        """Raise 429 if nothing may be generated for the request, which was let in to attach to an answer."""
        if self.refusal is not None:
            raise self.refusal

    def seen(self, info: CellInfo) -> CellInfo:
        """The cell with those of its models that the key may ask: it is not told that there are others."""
        return info if self.key is None or self.key.models is None else info.with_models(self.key.models)

    @property
    def tiers(self) -> tuple[str, ...] | None:
        """Service tiers that the key may ask for; None for all."""
        return None if self.key is None else self.key.tiers

    def take(self, call: Call, request: GenerationRequest, info: CellInfo) -> None:
        """Check the tier, and reserve the tokens the call is reckoned to come to.

        What it uses is counted from here on, and settled at its end: where its client named no bound, it may
        be more, which the key then owes.

        Raises:
            ApiError: 403 for a tier the key does not have, 429 or 400 for too many tokens.
        """
        if self.key is None:
            return
        tier = call.terms.tier
        if self.tiers is not None and tier not in self.tiers:
            allowed = ", ".join(sorted(self.tiers))
            instead = f" Name one in `service_tier` that it does: {allowed}." if allowed else ""
            raise forbidden(f"requests of the service tier '{tier}'", instead, param="service_tier")
        num_prompt = sum(len(state.prompt) for state in call.states[:: len(call.states) // call.num_prompts])
        most = num_prompt + sum(
            reckoned_tokens(request, max_new_tokens(request, len(state.prompt), info, call.prompt_field))
            for state in call.states
        )
        self._authenticator.reserve(self.key, most)
        self._reserved, self._used = most, num_prompt
        call.updates = self._counted(call.updates)

    async def _counted(self, updates: AsyncGenerator[Update, None]) -> AsyncGenerator[Update, None]:
        try:
            async with aclosing(updates):
                async for update in updates:
                    self._used += len(update.tokens)
                    yield update
        except RequestRejected:
            self._used = 0  # the prompt was not even read
            raise

    @property
    def tokens(self) -> tuple[int, int]:
        """Reserved and used."""
        return self._reserved, self._used

    def headers(self) -> dict[str, str]:
        """What a response tells of the key's limits."""
        return {} if self.key is None else self._authenticator.limit_headers(self.key)


class Authenticator:
    """Lets requests in by their keys, and keeps the keys to their limits; any thread may ask.

    Args:
        config: keys.
        max_open: requests for text open at once in this front end, of all keys together.
        replicas: how many front ends share the limits.
        environment: may hold one more key.
        clock: seconds.

    Raises:
        ValueError: if the keys cannot be read.
    """

    def __init__(
        self,
        config: SecurityConfig | None = None,
        *,
        max_open: int = 1 << 30,
        replicas: Callable[[], int] = lambda: 1,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = KeyStore(config or SecurityConfig(), environment, clock)
        self._presented = PresentedKeys()
        self._max_open, self._replicas, self._clock = max_open, replicas, clock
        self._limiters: dict[str, KeyLimiter] = {}
        self._num_open = 0
        self._num_attached: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def wants_keys(self) -> bool:
        """Whether requests need a key."""
        return not self._store.is_empty

    @contextmanager
    def admitted(
        self,
        authorization: str | None,
        permission: Permission,
        *,
        limited: bool = False,
        may_attach: bool = False,
    ) -> Iterator[Grant]:
        """The request within; it ends, and is accounted for, at the exit.

        Args:
            authorization: the header or metadata of that name.
            permission: what the key must allow.
            limited: whether it counts towards limits: requests for text and tokens do.
            may_attach: whether it may be one sent again, whose answer is open, and holds its place, already.

        Raises:
            ApiError: 401 without a valid key, 403 for one that does not allow this, 429 beyond a limit.
        """
        grant = Grant(self, self._authenticated(authorization, permission))
        if not limited:
            yield grant
            return
        self._open(grant, may_attach=may_attach)
        try:
            yield grant
        finally:
            grant.release()

    def close(self, grant: Grant) -> None:
        """A request that counted towards limits has ended, and so has what was generated for it."""
        with self._lock:
            self._num_open -= 1
            if grant.refusal is not None and grant.key is not None:
                self._num_attached[grant.key.name] -= 1
            if grant.limiter is not None:
                grant.limiter.close()
                grant.limiter.settle(*grant.tokens, self._clock())

    def reserve(self, key: KeyConfig, tokens: int) -> None:
        """Take tokens of the key's; raises `ApiError` if it has too few."""
        with self._lock:
            refusal = self._limiter(key).reserve(tokens, self._clock())
        if refusal is not None:
            raise _limited(refusal, tokens)

    def tenant(self, key: KeyConfig) -> Tenant:
        """What cells know a key as: neither its name nor its hash can be told from the label."""
        with self._lock:
            if len(self._store.keys()) < 2:
                return NOBODY
        return Tenant(label=hashlib.sha256(key.hash.encode()).hexdigest()[:16], weight=key.weight)

    def limit_headers(self, key: KeyConfig) -> dict[str, str]:
        """See `KeyLimiter.headers`."""
        with self._lock:
            return self._limiter(key).headers(self._clock())

    # -- parts -----------------------------------------------------------------------------------------

    def _authenticated(self, authorization: str | None, permission: Permission) -> KeyConfig | None:
        if not self.wants_keys:
            return None
        scheme, _, presented = (authorization or "").partition(" ")
        with self._lock:
            keys = self._store.keys()
        # Also without anything to compare: the time is not to tell how far it came.
        key = self._presented.find(presented.strip(), keys)
        if key is None or scheme.lower() != "bearer":
            raise unauthenticated()
        if permission not in key.permissions:
            raise forbidden(f"`{permission}` endpoints")
        return key

    def _open(self, grant: Grant, *, may_attach: bool) -> None:
        refusal, headers = None, {}
        with self._lock:
            if self._num_open >= self._max_open:
                raise ApiError(
                    429,
                    "As many requests are open as this server allows; try again in a moment.",
                    code="too_many_requests",
                    retry_after_s=1.0,
                    dropped_reason="rejected-saturated",
                )
            if grant.key is not None:
                now, limiter = self._clock(), self._limiter(grant.key)
                limiter.change(grant.key.limits, now)
                refusal = limiter.open(now)
                if refusal is None:
                    grant.limiter = limiter
                elif (
                    may_attach
                    and refusal.kind == "concurrent"
                    and self._num_attached[grant.key.name] < MOST_ATTACHED
                ):
                    grant.refusal = _limited(refusal)
                    refusal = limiter.count(now)
                    self._num_attached[grant.key.name] += refusal is None
                headers = limiter.headers(now)
            if refusal is None:
                self._num_open += 1
                return
        raise _limited(refusal, headers=headers)

    def _limiter(self, key: KeyConfig) -> KeyLimiter:
        now = self._clock()
        limiter = self._limiters.get(key.name)
        if limiter is None:
            limiter = self._limiters[key.name] = KeyLimiter(key.limits, now)
        limiter.share_among(max(1, self._replicas()), now)
        return limiter


def unauthenticated() -> ApiError:
    """A 401, the same for a key that is missing, malformed, unknown or withdrawn."""
    return ApiError(
        401,
        "A valid API key is needed. Send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY`.",
        code="invalid_api_key",
        headers=_CHALLENGE,
    )


def forbidden(what: str, instead: str = "", *, param: str | None = None) -> ApiError:
    """A 403 for what a valid key does not allow, and what to do instead."""
    return ApiError(
        403, f"This API key does not allow {what}.{instead}", param=param, code="permission_denied"
    )


def _limited(refusal: Refusal, asked: int = 0, headers: Mapping[str, str] | None = None) -> ApiError:
    if refusal.retry_after_s is None:
        return ApiError(
            400,
            f"This API key is limited to {refusal.limit} tokens per minute, and the request may come to "
            f"{asked}: its prompt and `max_tokens` of every choice. Ask for fewer.",
            param="max_tokens",
            code="tokens_above_limit",
        )
    limit = {
        "requests": f"{refusal.limit} requests per minute",
        "tokens": f"{refusal.limit} tokens per minute",
        "concurrent": f"{refusal.limit} requests at once",
    }[refusal.kind]
    return ApiError(
        429,
        f"This API key is limited to {limit}; try again in {max(1, math.ceil(refusal.retry_after_s))} s.",
        code="rate_limit_exceeded",
        retry_after_s=refusal.retry_after_s,
        dropped_reason="rejected-saturated",
        headers=headers,
    )
