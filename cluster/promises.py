"""Times that refused clients were told to come back at, and the capacity that is kept for them.

A time comes true only if others do not use what it counted on, and if not everybody is told the same one. So
each is an appointment: a share of the cell's time is kept for it, and whoever is refused next is told a
later one. What is kept for the next seconds may be much, as an overload that ends is over for newcomers
when those have gone by; beyond, it is little, so that newcomers find room as soon as an overload ends.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.running_mean import RunningMean
from cluster.stream_messages import Submit

# Shares of the cell's time that are kept for those who come back within so many seconds of the time
# when the load lets them, and later.
NEAR_S = 5.0
NEAR_SHARE, FAR_SHARE = 0.5, 0.2
# Of what is kept, near and far, one tenant gets at most so much: others are not told its late times.
TENANT_SHARE = 0.5
# How much later, or by its clock earlier, than it was told a client may come.
LATE_S, EARLY_S = 1.0, 0.1
# Whoever asks the same again so many seconds after it asked last has asked too early. Before, it is another
# client, or one that wants several answers: they ask at once. Later, it may as well be somebody else, and who
# was told a time by itself finds it kept.
REPEATED_S, INSISTS_S = 0.3, 3.0
# Whoever may come within so many seconds tries all times from then on, so that the next need not try them.
SOON_S = 30
# Most times that are tried for one client.
MOST_TRIED = 64
# Promises that are remembered, of 0.4 kB each; an hour of the simulated 8B cell has room for fewer.
MOST_PROMISED = 16384

Identity = tuple[str, str, int, int, int]


def identity(submit: Submit) -> Identity:
    """What a request and its repetition have in common; request ids and random seeds differ."""
    prompt = tuple(submit.prompt)
    return (submit.tenant.label, submit.tier, submit.sampling.max_tokens, len(prompt), hash(prompt))


@dataclass(frozen=True, slots=True, order=True)
class Promise:
    """A client was told to come back at a time.

    Attributes:
        at: when.
        number: of promises made before.
        who: what it is recognised by.
        priority: of its request.
        work_s: seconds of the cell's time that its request takes.
        is_near: whether it was made for one of the next seconds.
    """

    at: float
    number: int
    who: Identity = field(compare=False)
    priority: int = field(compare=False)
    work_s: float = field(compare=False)
    is_near: bool = field(compare=False)


@dataclass(slots=True)
class Promises:
    """The appointments of one scheduler.

    Attributes:
        max_after_s: longest time told.
        most: promises that are remembered; whoever is refused beyond is told the longest time.
    """

    max_after_s: float
    most: int = MOST_PROMISED
    _due: list[Promise] = field(default_factory=list)
    _by_identity: dict[Identity, list[Promise]] = field(default_factory=dict)
    # Seconds of the cell's time kept near, by label of the tenant.
    _near_s: dict[str, float] = field(default_factory=dict)
    # Before this there is no room for a tenant's promises that are not near, by its label.
    _full_until: dict[str, float] = field(default_factory=dict)
    # Likewise from one time up to another, of who could come late only.
    _full_late: dict[str, tuple[float, float]] = field(default_factory=dict)
    # When the client of a promise asked last, by its number.
    _asked_at: dict[int, float] = field(default_factory=dict)
    _num_made: int = 0
    # Share of those promised who come.
    _shown: RunningMean = field(default_factory=lambda: RunningMean(1.0))

    def is_due(self, label: str, now: float) -> bool:
        """Whether any of the tenant is expected within the next seconds, as in an overload that lasts."""
        return any(
            promise.who[0] == label for promise in self._due[: bisect_right(self._due, now + NEAR_S, key=_at)]
        )

    def __len__(self) -> int:
        return len(self._due)

    def make(
        self,
        submit: Submit,
        after_s: float,
        work_s: float,
        now: float,
        *,
        may_be_near: bool,
        scarcity: float = 0.0,
    ) -> float:
        """Tell a client when to come back, in whole seconds, as it is sent over HTTP.

        One that asks again too early is told of the same time. With a new one for each question, clients that
        ask every second would fill the times to come, and those who wait as told would come last.

        Args:
            submit: what it asked for.
            after_s: before then it would be in vain.
            work_s: seconds of the cell's time that it takes.
            now: the present.
            may_be_near: whether it may have what is kept for the next seconds.
            scarcity: from 0 to 1, by how much less a tenant gets of that, as many are late now.
        """
        who, least_s = identity(submit), max(1, math.ceil(after_s))
        repeated = self._repeated(who, now)
        if repeated is not None:
            self._asked_at[repeated.number] = now
            return float(max(1, math.ceil(repeated.at - now - EARLY_S)))
        if len(self._due) >= self.most:
            return self.max_after_s
        work_s *= self._shown.value
        label = who[0]
        tenant_share = TENANT_SHARE if label else 1.0
        near_s = (1.0 - scarcity) * tenant_share * NEAR_SHARE * NEAR_S
        if may_be_near and self._near_s.get(label, 0.0) < near_s:
            for told_s in range(least_s, least_s + int(NEAR_S) + 1):
                if told_s <= self.max_after_s and self._has_room(now + told_s, work_s, NEAR_SHARE):
                    return self._made(who, submit.priority, now, told_s, work_s, is_near=True)
        told_s = max(least_s, math.ceil(self._full_until.get(label, 0.0) - now))
        since, until = self._full_late.get(label, (math.inf, 0.0))
        if since <= now + told_s < until:
            told_s = math.ceil(until - now)
        for _ in range(MOST_TRIED):
            if told_s > self.max_after_s:
                break
            at = now + told_s
            if self._has_room(at, work_s, FAR_SHARE) and (
                not label or self._has_room(at, work_s, TENANT_SHARE * FAR_SHARE, label)
            ):
                self._filled(label, at, least_s, now)
                return self._made(who, submit.priority, now, told_s, work_s, is_near=False)
            told_s += max(1, int(work_s / (tenant_share * FAR_SHARE)))
        self._filled(label, now + min(told_s, self.max_after_s), least_s, now)
        return self.max_after_s

    def took(self, submit: Submit, now: float) -> None:
        """A request that nothing was kept for was taken: if it was told to come later, it does not."""
        promise = self._repeated(identity(submit), now) if self._due else None
        if promise is not None:
            self._remove(promise)

    def is_early(self, submit: Submit, now: float) -> bool:
        """Whether the client of a promise asks again before its time."""
        return bool(self._due) and self._repeated(identity(submit), now) is not None

    def _repeated(self, who: Identity, now: float) -> Promise | None:
        """The promise of a client that asks again before its time; of several, the first."""
        for promise in self._by_identity.get(who, ()):
            if promise.at > now and REPEATED_S <= now - self._asked_at[promise.number] <= INSISTS_S:
                return promise
        return None

    def _filled(self, label: str, until: float, least_s: int, now: float) -> None:
        """There is no room from the next seconds up to a time, unless only what came late was tried."""
        if least_s <= SOON_S:
            self._full_until[label] = max(self._full_until.get(label, 0.0), until)
            return
        since, before = self._full_late.get(label, (math.inf, 0.0))
        is_same = since <= now + least_s <= before
        self._full_late[label] = (since, max(before, until)) if is_same else (now + least_s, until)

    def _made(
        self, who: Identity, priority: int, now: float, told_s: int, work_s: float, *, is_near: bool
    ) -> float:
        promise = Promise(now + told_s, self._num_made, who, priority, work_s, is_near)
        self._asked_at[self._num_made] = now
        self._num_made += 1
        insort(self._due, promise)
        self._by_identity.setdefault(who, []).append(promise)
        if is_near:
            self._near_s[who[0]] = self._near_s.get(who[0], 0.0) + work_s
        return float(told_s)

    def _has_room(self, at: float, work_s: float, share: float, label: str | None = None) -> bool:
        """Whether those around a time, of all tenants or of one, leave it room for one more."""
        window_s = max(1.0, work_s / share)
        first = bisect_right(self._due, at - window_s / 2, key=_at)
        last = bisect_right(self._due, at + window_s / 2, key=_at)
        others_s = sum([one.work_s for one in self._due[first:last] if label in (None, one.who[0])])
        return others_s + work_s <= share * window_s + 1e-9

    def keep(self, submit: Submit, now: float) -> bool:
        """Whether the request comes as it was told; then its promise is done with."""
        due = self._by_identity.get(identity(submit)) if self._due else None
        for promise in due or ():
            if now - LATE_S <= promise.at <= now + EARLY_S:
                self._remove(promise)
                self._shown.follow(1.0)
                return True
        return False

    def expire(self, now: float) -> None:
        """Forget those who did not come."""
        while self._due and self._due[0].at < now - LATE_S:
            self._remove(self._due[0])
            self._shown.follow(0.0)
        if not self._due:
            self._full_until.clear()
            self._full_late.clear()

    def _remove(self, promise: Promise) -> None:
        del self._asked_at[promise.number]
        del self._due[bisect_left(self._due, promise)]
        same = self._by_identity[promise.who]
        same.remove(promise)
        if not same:
            del self._by_identity[promise.who]
        if promise.is_near:
            label = promise.who[0]
            # Of work as small as rounding errors nothing is left before the last of it is gone.
            left_s = self._near_s.pop(label, 0.0) - promise.work_s
            if left_s > 1e-9:
                self._near_s[label] = left_s

    def num_due(self, passes: Callable[[str, int], bool], until: float) -> float:
        """How many are expected to come until a time, of the tenants and priorities told to pass."""
        due = self._due[: bisect_right(self._due, until, key=_at)]
        return self._shown.value * sum(passes(promise.who[0], promise.priority) for promise in due)

    def num_due_of_each(self, until: float) -> dict[str, float]:
        """The same by label, of every tenant of whom any are expected: told in one look at all of them."""
        due = self._due[: bisect_right(self._due, until, key=_at)]
        return {label: self._shown.value * num for label, num in Counter(map(_label, due)).items()}


def _at(promise: Promise) -> float:
    return promise.at


def _label(promise: Promise) -> str:
    return promise.who[0]
