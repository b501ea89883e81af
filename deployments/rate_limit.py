"""Token buckets of one API key: how many requests and tokens it may still take; time is passed in.

A bucket holds one minute's worth, and is refilled continuously. In any time of `w` minutes a key so gets at
most `(1 + w)` times its limit per minute. Every key has buckets of its own: none can take from another's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cluster.security_config import KeyLimits

Kind = Literal["requests", "tokens", "concurrent"]

#: Levels are sums of fractions; by so little one may be short of a whole.
_ROUNDING = 1e-6
#: In so many seconds as much flows in as a bucket holds.
_FULL_S = 60.0


class TokenBucket:
    """A bucket of one kind; `now` never goes back.

    Args:
        per_minute: its size, and what flows into it in a minute.
        now: seconds, on any clock.
    """

    def __init__(self, per_minute: float, now: float) -> None:
        self._capacity = per_minute
        self._level = per_minute
        self._at = now
        # What flows in before then is what others were told to come for.
        self._told_until = now

    @property
    def capacity(self) -> float:
        """What it holds at most."""
        return self._capacity

    def level(self, now: float) -> float:
        """What is in it; below zero after more was taken than it holds."""
        if now > self._at:
            self._level = min(self._capacity, self._level + (now - self._at) * self._capacity / _FULL_S)
            self._at = now
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be taken.

        Of a full bucket any amount may be: a front end that has but a share of the limit would else refuse
        for ever what the limit allows. The bucket is then in debt, so that the rate is kept.
        """
        short = min(amount, self._capacity) - self.level(now)
        return 0.0 if short <= _ROUNDING else short * _FULL_S / self._capacity

    def tell_s(self, amount: float, now: float) -> float:
        """Seconds after which to come for `amount`, for who is told that it may not be taken now.

        Of several each is told a later time: at the same one all but one would come in vain. Nothing is kept
        for them. Who asks before its time is told another one, so the times are those of the next minute, or
        up to twice the least if that is more; then the first is told again.
        """
        wait = self.wait_s(amount, now)
        share_s = min(amount, self._capacity) * _FULL_S / self._capacity
        until = max(now + wait, self._told_until + share_s)
        self._told_until = until if until <= now + max(_FULL_S, 2 * wait) else now + wait
        return self._told_until - now

    def take(self, amount: float, now: float) -> None:
        """Take `amount`, or give back if it is negative, though never beyond its size."""
        self._level = min(self._capacity, self.level(now) - amount)

    def resize(self, per_minute: float, now: float) -> None:
        """Another size: as full, or as deep in debt, as before by share."""
        share = self.level(now) / self._capacity
        self._capacity, self._level = per_minute, share * per_minute

    def reset_s(self, now: float) -> float:
        """Seconds until it is full."""
        return (self._capacity - self.level(now)) * _FULL_S / self._capacity


@dataclass(frozen=True)
class Refusal:
    """A limit that was reached.

    Attributes:
        kind: which.
        limit: the key's, in all front ends together.
        retry_after_s: when it may be tried again; None if it never can.
    """

    kind: Kind
    limit: int
    retry_after_s: float | None


class KeyLimiter:
    """The limits of one key in one front end, which has an equal share of them.

    Shares of rates are exact, but for the full bucket with which a front end joins. Of requests open at once
    a front end always allows one, so with more front ends than `max_concurrent` there may be as many.

    Args:
        limits: of all front ends together.
        now: seconds.
    """

    def __init__(self, limits: KeyLimits, now: float) -> None:
        self.limits = limits
        self._replicas = 1
        self._open = 0
        self._requests = _bucket(limits.requests_per_minute, now)
        self._tokens = _bucket(limits.tokens_per_minute, now)

    @property
    def num_open(self) -> int:
        """Requests open now, in this front end."""
        return self._open

    def share_among(self, replicas: int, now: float) -> None:
        """There are so many front ends now."""
        if replicas == self._replicas:
            return
        self._replicas = replicas
        for bucket, limit in (
            (self._requests, self.limits.requests_per_minute),
            (self._tokens, self.limits.tokens_per_minute),
        ):
            if bucket is not None and limit is not None:
                bucket.resize(limit / replicas, now)

    def change(self, limits: KeyLimits, now: float) -> None:
        """The key has these limits from now on; what is open, and what was used, still counts."""
        if limits == self.limits:
            return
        self.limits = limits
        self._requests = self._changed(self._requests, limits.requests_per_minute, now)
        self._tokens = self._changed(self._tokens, limits.tokens_per_minute, now)

    def open(self, now: float) -> Refusal | None:
        """A request begins, or is refused; whoever opened one calls `close` once."""
        most = self.limits.max_concurrent
        if most is not None and self._open >= max(1, most // self._replicas):
            # When one of them ends nobody knows; a second is a polite time to try again.
            return Refusal("concurrent", most, 1.0)
        refusal = self.count(now)
        if refusal is None:
            self._open += 1
        return refusal

    def count(self, now: float) -> Refusal | None:
        """A request came, or is refused, that has no place among those open at once."""
        per_minute = self.limits.requests_per_minute
        if self._requests is not None and per_minute is not None:
            if self._requests.wait_s(1.0, now) > 0.0:
                return Refusal("requests", per_minute, self._requests.tell_s(1.0, now))
            self._requests.take(1.0, now)
        return None

    def close(self) -> None:
        """A request that was opened ended."""
        assert self._open > 0, "closed more often than opened"
        self._open -= 1

    def reserve(self, tokens: int, now: float) -> Refusal | None:
        """Take all tokens a request may come to, or refuse it."""
        per_minute = self.limits.tokens_per_minute
        if self._tokens is None or per_minute is None:
            return None
        if tokens > per_minute:
            return Refusal("tokens", per_minute, None)
        if self._tokens.wait_s(tokens, now) > 0.0:
            return Refusal("tokens", per_minute, self._tokens.tell_s(tokens, now))
        self._tokens.take(tokens, now)
        return None

    def settle(self, reserved: int, used: int, now: float) -> None:
        """A request that reserved so many tokens used so many."""
        if self._tokens is not None:
            self._tokens.take(used - reserved, now)

    def _changed(self, bucket: TokenBucket | None, limit: int | None, now: float) -> TokenBucket | None:
        if limit is None:
            return None
        per_minute = limit / self._replicas
        if bucket is None:
            return TokenBucket(per_minute, now)
        bucket.resize(per_minute, now)
        return bucket

    def headers(self, now: float) -> dict[str, str]:
        """OpenAI's headers: the limit, what remains of this front end's share, when it is full again."""
        shown: dict[str, str] = {}
        for name, bucket, limit in (
            ("requests", self._requests, self.limits.requests_per_minute),
            ("tokens", self._tokens, self.limits.tokens_per_minute),
        ):
            if bucket is not None:
                shown[f"x-ratelimit-limit-{name}"] = str(limit)
                shown[f"x-ratelimit-remaining-{name}"] = str(max(0, int(bucket.level(now) + _ROUNDING)))
                shown[f"x-ratelimit-reset-{name}"] = duration(bucket.reset_s(now))
        return shown


def duration(seconds: float) -> str:
    """As OpenAI writes them: `20ms`, `7.5s`, `6m0s`."""
    if seconds < 1.0:
        return f"{round(1000 * seconds)}ms"
    minutes, rest = divmod(round(seconds, 1), 60.0)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"


def _bucket(per_minute: int | None, now: float) -> TokenBucket | None:
    return None if per_minute is None else TokenBucket(float(per_minute), now)
