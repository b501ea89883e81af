"""Load on a served system: references, saturation, and an open loop at a share of it."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.live_client import Choice, Delivery, End, LiveClient
from benchmarks.live_comparison import Comparison
from benchmarks.live_requests import LiveRequest

#: Objectives as multiples of what a class has alone on the system, of TPOT and of TTFT.
_TPOT_TIMES = {"code": 2.0, "chat": 3.0, "summary": 4.0}
_TTFT_TIMES = {"code": 5.0, "chat": 8.0, "summary": 12.0}
# Below this, a first token is a matter of the machine's mood.
_LEAST_TTFT_MS = 100.0


@dataclass(frozen=True, slots=True)
class Baseline:
    """What the undisturbed system gives.

    Attributes:
        references: choices of every distinct request, asked alone.
        slos: objectives by class, in milliseconds, by field of `slo`.
    """

    references: Mapping[int, Mapping[int, Choice]]
    slos: Mapping[str, Mapping[str, float]]


async def measure_baseline(client: LiveClient, requests: Sequence[LiveRequest]) -> Baseline:
    """Ask every request alone.

    Raises:
        RuntimeError: if one fails, which leaves nothing to compare with.
    """
    deliveries = []
    for request in requests:
        delivery = await client.ask(request, f"reference-{request.index}")
        if not delivery.is_answered:
            raise RuntimeError(f"request {request.index} failed alone: {delivery.last.error}")
        deliveries.append(delivery)
    slos = {}
    for domain in sorted({request.domain for request in requests}):
        of = [one for one in deliveries if one.request.domain == domain]
        tpots = [one.tpot_ms for one in of if one.tpot_ms is not None]
        ttfts = [one.ttft_ms for one in of if one.ttft_ms is not None]
        if not tpots or not ttfts:
            raise RuntimeError(f"no streamed requests of class {domain}: ask more distinct requests")
        slos[domain] = {
            "tpot_ms": round(statistics.median(tpots) * _TPOT_TIMES.get(domain, 3.0), 3),
            "ttft_ms": round(max(_LEAST_TTFT_MS, statistics.median(ttfts) * _TTFT_TIMES.get(domain, 8.0)), 3),
        }
    references = {one.request.index: one.last.choices for one in deliveries}
    return Baseline(references, slos)


async def measure_saturation(
    client: LiveClient,
    requests: Sequence[LiveRequest],
    seconds: float,
    streams: int,
    comparison: Comparison,
) -> float:
    """Requests per second that end while `streams` are always open."""
    turns = itertools.count()
    started = time.monotonic()
    num_ended = 0

    async def one_stream() -> None:
        nonlocal num_ended
        while time.monotonic() - started < seconds:
            turn = next(turns)
            delivery = await client.ask(requests[turn % len(requests)], f"saturation-{turn}")
            comparison.add(delivery)
            num_ended += time.monotonic() - started < seconds

    await asyncio.gather(*(one_stream() for _ in range(streams)))
    return num_ended / seconds


@dataclass(frozen=True, slots=True)
class LoadRate:
    """How fast an open loop sends.

    Attributes:
        per_s: requests per second.
        saturated_per_s: what the system saturates at, if that was measured.
    """

    per_s: float
    saturated_per_s: float | None


async def load_rate(
    client: LiveClient,
    requests: Sequence[LiveRequest],
    comparison: Comparison,
    *,
    rate: float,
    load: float,
    saturation_s: float,
    saturation_streams: int,
) -> LoadRate:
    """The rate that is asked for.

    Args:
        client: asks, where saturation is to be measured.
        requests: distinct ones, in turn.
        comparison: is told of every end.
        rate: requests per second; 0 takes `load` as a share of the saturated rate, which is measured.
        load: that share.
        saturation_s, saturation_streams: how it is measured (`measure_saturation`).

    Raises:
        RuntimeError: if nothing ended while saturation was measured.
    """
    if rate:
        return LoadRate(rate, None)
    saturated = await measure_saturation(client, requests, saturation_s, saturation_streams, comparison)
    if not saturated:
        raise RuntimeError("no request ended while saturation was measured; make --saturation-s longer")
    return LoadRate(load * saturated, saturated)


@dataclass(frozen=True, slots=True)
class Ended:
    """What is kept of a request of an open loop; times in seconds on the client's clock.

    Attributes:
        domain: its class.
        sent_s, ended_s: first attempt, and end of the last.
        ttft_ms, tpot_ms: as the client saw them; None where they say nothing.
        attained: whether it met its objectives.
        num_tokens: of its answer.
        attempts: when each was sent, when its first tokens came, when it ended, and how.
    """

    domain: str
    sent_s: float
    ended_s: float
    ttft_ms: float | None
    tpot_ms: float | None
    attained: bool
    num_tokens: int
    attempts: tuple[tuple[float, float | None, float, End], ...]

    @classmethod
    def of(cls, delivery: Delivery, slo: Mapping[str, float]) -> Ended:
        """Of a delivery."""
        return cls(
            domain=delivery.request.domain,
            sent_s=delivery.sent_s,
            ended_s=delivery.last.ended_s,
            ttft_ms=delivery.ttft_ms,
            tpot_ms=delivery.tpot_ms,
            attained=delivery.attains(slo),
            num_tokens=sum(len(choice.tokens) for choice in delivery.last.choices.values()),
            attempts=tuple(
                (one.sent_s, one.arrivals[0][0] if one.arrivals else None, one.ended_s, one.end)
                for one in delivery.attempts
            ),
        )


class OpenLoop:
    """Sends the requests in turn at a fixed rate, whatever becomes of them.

    Args:
        client: asks them.
        requests: distinct ones, in turn.
        rate: requests per second, evenly spaced.
        slos: objectives by class.
        comparison: is told of every end.
        name: begins every request id.
    """

    def __init__(
        self,
        client: LiveClient,
        requests: Sequence[LiveRequest],
        rate: float,
        slos: Mapping[str, Mapping[str, float]],
        comparison: Comparison,
        name: str,
    ) -> None:
        self._client = client
        self._requests = requests
        self._rate = rate
        self._slos = slos
        self._comparison = comparison
        self._name = name
        self._open: set[asyncio.Task[None]] = set()
        self.ended: list[Ended] = []
        self.late_s = 0.0

    @property
    def num_open(self) -> int:
        """Requests without an end."""
        return len(self._open)

    async def run(self, seconds: float) -> None:
        """Send for so long, then wait for the last answer."""
        started = time.monotonic()
        for turn in itertools.count():
            due = turn / self._rate
            if due >= seconds:
                break
            await asyncio.sleep(max(0.0, started + due - time.monotonic()))
            self.late_s = max(self.late_s, time.monotonic() - started - due)
            task = asyncio.create_task(self._one(turn))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
        while self._open:
            await asyncio.gather(*self._open)

    async def _one(self, turn: int) -> None:
        request = self._requests[turn % len(self._requests)]
        slo = self._slos[request.domain]
        delivery = await self._client.ask(request, f"{self._name}-{turn}", slo)
        self._comparison.add(delivery)
        self.ended.append(Ended.of(delivery, slo))
