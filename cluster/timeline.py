"""Who worked when: every call to a worker and every turn of the scheduler, as a trace for Perfetto."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cluster.config import FlotillaConfig
from cluster.core import SchedulerCore
from cluster.events import Action, Draft, DraftDone, Event, Verify, VerifyDone, WorkerLost
from drafters.messages import DraftCall, DraftResult
from verifier.messages import VerifyCall, VerifyResult

TARGET, SCHEDULER = "target", "scheduler"
# The least time messages took is believed for so many calls of a worker.
OFFSET_CALLS = 256


class Slice(msgspec.Struct, frozen=True):
    """Something a worker did.

    Attributes:
        track: a drafter's name, `target` or `scheduler`.
        name: what it did.
        start, end: seconds on the cell's monotonic clock.
        args: sizes, for people.
    """

    track: str
    name: str
    start: float
    end: float
    args: dict[str, Any]


@dataclass(slots=True)
class _Sent:
    """A call that is not answered."""

    name: str
    at: float
    args: dict[str, Any]


@dataclass(slots=True)
class _Messages:
    """How long messages to and from one worker take: half of what a call took besides its work, at least."""

    best_s: float = float("inf")
    calls: int = 0

    def offset_s(self, beside_s: float) -> float:
        """Seconds one way, once a call has taken `beside_s` besides its work."""
        self.calls += 1
        if beside_s < self.best_s or self.calls > OFFSET_CALLS:
            self.best_s, self.calls = max(0.0, beside_s), 0
        return self.best_s / 2


@dataclass(slots=True)
class Timeline:
    """The newest slices of all workers, on one clock.

    Workers tell how long they worked, not when: their clocks may differ. An answer is taken to have left the
    worker as long before it came as the quickest messages to it take, and its work to have ended then. What
    a worker does one after the other never overlaps, and nothing begins before it was asked for.

    Attributes:
        size: slices kept.
    """

    size: int
    _slices: deque[Slice] = field(init=False)
    _sent: dict[tuple[str, int], _Sent] = field(default_factory=dict)
    _messages: dict[str, _Messages] = field(default_factory=dict)
    _last_end: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._slices = deque(maxlen=self.size)

    def handled(
        self, event: Event, actions: Sequence[Action], core: SchedulerCore, start: float, end: float
    ) -> None:
        """The scheduler took `event` in at `start` and had its `actions` at `end`, in seconds."""
        match event:
            case DraftDone(drafter, result):
                self._answered(drafter, result.call_id, result.seconds, start, _draft_outcome(result))
            case VerifyDone(result):
                self._answered(TARGET, result.call_id, result.seconds, start, _verify_outcome(result))
            case WorkerLost(name):
                track = TARGET if name == "verifier" else name
                for key in [key for key in self._sent if key[0] == track]:
                    del self._sent[key]
        self.sent(actions, core, end)
        self._slices.append(Slice(SCHEDULER, type(event).__name__, start, end, {"actions": len(actions)}))

    def sent(self, actions: Sequence[Action], core: SchedulerCore, at: float) -> None:
        """Calls among the `actions` went to workers `at` so many seconds."""
        for action in actions:
            match action:
                case Draft(name, call):
                    is_read = all(item.plan.depth == 0 for item in call.items)
                    args = _draft_args(call, core)
                    self._sent[name, call.call_id] = _Sent("read" if is_read else "draft", at, args)
                case Verify(call):
                    kind = "verify" if call.verify else "prefill"
                    self._sent[TARGET, call.call_id] = _Sent(kind, at, _verify_args(call, core))

    def trace(self) -> bytes:
        """The slices in the trace event format, JSON with times in microseconds.

        May be called in another thread than those that handle events: slices do not change, and a list of
        them is made at once.
        """
        slices = list(self._slices)
        tracks = [SCHEDULER, TARGET]
        tracks += sorted({one.track for one in slices} - set(tracks))
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "flotilla cell"}}
        ]
        for number, track in enumerate(tracks):
            same = {"ph": "M", "pid": 1, "tid": number}
            events.append({**same, "name": "thread_name", "args": {"name": track}})
            events.append({**same, "name": "thread_sort_index", "args": {"sort_index": number}})
        for one in slices:
            events.append(
                {
                    "ph": "X",
                    "name": one.name,
                    "cat": "scheduler" if one.track == SCHEDULER else "worker",
                    "pid": 1,
                    "tid": tracks.index(one.track),
                    "ts": round(1e6 * one.start, 1),
                    "dur": round(1e6 * max(0.0, one.end - one.start), 1),
                    "args": one.args,
                }
            )
        # One by one: encoding them as one object would keep other threads from running.
        encoded = b",".join(map(msgspec.json.encode, events))
        return b'{"traceEvents":[' + encoded + b'],"displayTimeUnit":"ms"}'

    def _answered(
        self, track: str, call_id: int, seconds: float, now: float, outcome: dict[str, Any]
    ) -> None:
        sent = self._sent.pop((track, call_id), None)
        if sent is None:
            return
        # A call that waited behind another tells nothing of messages, but never too little.
        begun = max(sent.at, self._last_end.get(track, sent.at))
        offset_s = self._messages.setdefault(track, _Messages()).offset_s(now - begun - seconds)
        end = max(begun, now - offset_s)
        start = max(begun, end - seconds)
        self._last_end[track] = end
        self._slices.append(Slice(track, sent.name, start, end, {**sent.args, **outcome}))


def make_timeline(config: FlotillaConfig) -> Timeline | None:
    """As `debug.timeline` says; None if it is off."""
    return Timeline(config.debug.timeline) if config.debug.timeline else None


def _draft_args(call: DraftCall, core: SchedulerCore) -> dict[str, Any]:
    return {
        "micro_batches": _micro_batches((item.request_id for item in call.items), core),
        "requests": [item.request_id for item in call.items],
        "depth": max((item.plan.depth for item in call.items), default=0),
        "ahead_ms": round(1e3 * call.ahead_s, 3),
    }


def _draft_outcome(result: DraftResult) -> dict[str, Any]:
    return {
        "tokens": sum(draft.tree.num_drafted for draft in result.drafts),
        "forwards": result.num_forwards,
    }


def _verify_args(call: VerifyCall, core: SchedulerCore) -> dict[str, Any]:
    return {
        "micro_batches": _micro_batches((item.request_id for item in call.verify), core),
        "requests": [item.request_id for item in call.verify],
        "tokens": sum(item.num_nodes for item in call.verify),
        "depth": max(
            (int(item.tree.depth.max()) for item in call.verify if item.tree is not None), default=0
        ),
        "prefilling": [item.request_id for item in call.prefill],
    }


def _verify_outcome(result: VerifyResult) -> dict[str, Any]:
    return {
        "committed": sum(len(verdict.tokens) for verdict in result.verdicts),
        "forward_ms": round(1e3 * result.forward_seconds, 3),
    }


def _micro_batches(request_ids: Iterable[str], core: SchedulerCore) -> list[int]:
    found = (core.requests.get(request_id) for request_id in request_ids)
    return sorted({request.micro_batch for request in found if request is not None})
