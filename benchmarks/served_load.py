"""Closed loops on a served system: what clients saw, and what its cells counted meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks import prompts, tables, workload
from benchmarks.live_system import Scrape
from benchmarks.load_client import LoadClient, Outcome
from benchmarks.serve import SPECULATION_OFF, find_model

# Of a decode iteration (docs/metrics.md).
_PHASES = ("draft", "verify", "target", "schedule", "other")


@dataclass(frozen=True, slots=True)
class Figures:
    """A closed loop of one way of speculating.

    Attributes:
        way, concurrency: what was asked, how many at once.
        seconds, requests, errors: of the loop.
        tokens_per_s: of all requests together.
        tpot_ms, ttft_ms: of the requests, medians.
        steps: verify calls. step_ms: mean time from one answer to the next.
        shares: of the time of decode iterations, by phase (docs/metrics.md).
        verify_ms: the target's work on a call, mean.
        draft_ms: a drafter's work on a call, mean, by drafter.
        requests_per_step: decoded in a call, mean.
        tokens_per_step: committed per request in a call, the first token, of the prompt, among them.
        accepted: tokens accepted, by drafter. acceptance: share of those verified.
    """

    way: str
    concurrency: int
    seconds: float
    requests: int
    errors: int
    tokens_per_s: float
    tpot_ms: float | None
    ttft_ms: float | None
    steps: float
    step_ms: float | None
    shares: dict[str, float]
    verify_ms: float | None
    draft_ms: dict[str, float]
    requests_per_step: float | None
    tokens_per_step: float | None
    accepted: dict[str, float]
    acceptance: dict[str, float]


def figures(
    way: str, concurrency: int, seconds: float, outcomes: Sequence[Outcome], before: Scrape, after: Scrape
) -> Figures:
    """Of what clients saw and what the cell counted between two scrapes."""

    def grown(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    def mean_ms(histogram: str, **labels: str) -> float | None:
        return _over(1e3 * grown(f"{histogram}_sum", **labels), grown(f"{histogram}_count", **labels))

    done = [one for one in outcomes if one.is_ok]
    tokens = sum(one.num_output_tokens for one in done)
    phases = {name: grown("flotilla_step_phase_seconds_total", phase=name) for name in _PHASES}
    drafters = sorted(
        {of["drafter"] for name, of, _ in after.samples if name == "flotilla_drafter_tokens_total"}
    )
    accepted = {
        name: grown("flotilla_drafter_tokens_total", drafter=name, outcome="accepted") for name in drafters
    }
    verified = {
        name: grown("flotilla_drafter_tokens_total", drafter=name, outcome="verified") for name in drafters
    }
    decoded = grown("flotilla_batch_requests_sum", phase="decode")
    drafts = {name: mean_ms("flotilla_draft_call_seconds", drafter=name) for name in drafters}
    return Figures(
        way=way,
        concurrency=concurrency,
        seconds=seconds,
        requests=len(done),
        errors=len(outcomes) - len(done),
        tokens_per_s=tokens / seconds,
        tpot_ms=_median([one.tpot_ms for one in done]),
        ttft_ms=_median([one.ttft_ms for one in done]),
        steps=grown("flotilla_steps_total"),
        step_ms=mean_ms("flotilla_step_seconds"),
        shares={name: part / (sum(phases.values()) or 1.0) for name, part in phases.items()},
        verify_ms=mean_ms("flotilla_verify_call_seconds"),
        draft_ms={name: value for name, value in drafts.items() if value is not None},
        requests_per_step=_over(decoded, grown("flotilla_batch_requests_count", phase="decode")),
        tokens_per_step=_over(tokens, decoded),
        accepted=accepted,
        acceptance={name: accepted[name] / count for name, count in verified.items() if count},
    )


def _over(value: float, by: float) -> float | None:
    return value / by if by else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


async def closed_loop(
    client: LoadClient,
    requests: Iterator[workload.BenchRequest],
    concurrency: int,
    seconds: float,
    extra: Mapping[str, Any],
) -> tuple[list[Outcome], float]:
    """Outcomes of so many requests at once, the next sent as one ends, and the seconds until the last did."""
    outcomes, started = list[Outcome](), time.monotonic()

    async def one() -> None:
        while time.monotonic() - started < seconds:
            outcomes.append(await client.send(next(requests), extra=extra))

    await asyncio.gather(*(one() for _ in range(concurrency)))
    return outcomes, time.monotonic() - started


async def load(
    url: str,
    way: str,
    drafters: Sequence[str],
    seconds: float,
    concurrencies: Sequence[int],
    max_tokens: int = 96,
    learn_s: float = 0.0,
) -> AsyncIterator[Figures]:
    """Closed loops with speculation and without, each as it ends.

    Args:
        url: of the server.
        way: what its policy is called in the figures; if that is "off", only without speculation.
        drafters: who may draft; everybody if empty.
        seconds: of each loop.
        concurrencies: requests at once.
        max_tokens: of an answer.
        learn_s: of a loop before each with speculation, of which there are figures, too: what is not known
            at first is learnt in it. If 0, and without speculation, a loop of a quarter of `seconds` is not
            measured.
    """
    on: Mapping[str, Any] = {"speculation": {"drafters": list(drafters)}} if drafters else {}
    off: Mapping[str, Any] = SPECULATION_OFF
    # One after the other in all loops: none finds the prompts of the one before in a prefix cache.
    requests = itertools.cycle(workload.build(prompts.load("zoo"), max_tokens=max_tokens, seed=3))
    ways = [("off", off)] if way == "off" else [(way, on), ("off", off)]
    async with LoadClient(url, "", send_slo=False) as client:
        client.model = await find_model(client, None)
        for concurrency, (name, extra) in itertools.product(concurrencies, ways):
            loops = [(name, seconds)]
            if learn_s and name != "off":
                loops.insert(0, (f"{name}, at first", learn_s))
            else:
                await closed_loop(client, requests, concurrency, seconds / 4, extra)  # costs are learnt
            for called, length in loops:
                before = await _scrape(client)
                outcomes, took = await closed_loop(client, requests, concurrency, length, extra)
                if outcomes and not outcomes[-1].is_ok:
                    print("an error:", outcomes[-1].error)
                yield figures(called, concurrency, took, outcomes, before, await _scrape(client))


async def differences(url: str, count: int, concurrency: int, max_tokens: int) -> dict[str, Any]:
    """How many greedy answers differ from those without speculation, asked one at a time.

    In bfloat16 another number of rows is another order of sums, so that some do; plain ones of several
    requests at once say how many do without drafts. Prompts are found in no prefix cache only if the
    server keeps none.
    """
    requests = workload.build(prompts.load("zoo"), count=count, max_tokens=max_tokens, seed=5)
    found: dict[str, Any] = {"answers": len(requests), "concurrency": concurrency}
    async with LoadClient(url, "", send_slo=False) as client:
        client.model = await find_model(client, None)
        expected = await _answers(client, requests, 1, SPECULATION_OFF)
        for name, at_once, extra in (
            ("drafts, alone", 1, {}),
            ("plain, at once", concurrency, SPECULATION_OFF),
            ("drafts, at once", concurrency, {}),
        ):
            answers = await _answers(client, requests, at_once, extra)
            found[name] = sum(one != other for one, other in zip(answers, expected, strict=True))
    return found


async def _answers(
    client: LoadClient,
    requests: Sequence[workload.BenchRequest],
    concurrency: int,
    extra: Mapping[str, Any],
) -> list[str]:
    room = asyncio.Semaphore(concurrency)

    async def ask(request: workload.BenchRequest) -> str:
        async with room:
            outcome = await client.send(request, extra=extra)
        if not outcome.is_ok:
            raise RuntimeError(f"request {request.index} failed: {outcome.error}")
        return outcome.text

    return list(await asyncio.gather(*map(ask, requests)))


async def _scrape(client: LoadClient) -> Scrape:
    await asyncio.sleep(0.1)  # what the last step counts
    async with client.session.get(f"{client.url}/metrics") as response:
        return Scrape.of(await response.text())


def show(one: Figures) -> None:
    """As a line of what clients saw, one of steps and one of drafters."""
    shares = ", ".join(f"{name} {100 * share:.1f}%" for name, share in one.shares.items())
    tpot, ttft = tables.number(one.tpot_ms, 2, " ms"), tables.number(one.ttft_ms, 1, " ms")
    print(
        f"{one.way} x{one.concurrency}: {one.tokens_per_s:.0f} tokens/s, TPOT {tpot}, TTFT {ttft}; ",
        end="",
    )
    print(f"{one.requests} requests, {one.errors} errors in {one.seconds:.1f} s")
    step, verify = tables.number(one.step_ms, 2, " ms"), tables.number(one.verify_ms, 2, " ms")
    requests, tokens = tables.number(one.requests_per_step), tables.number(one.tokens_per_step, 2)
    print(f"  {one.steps:.0f} steps of {step} ({shares}; verify {verify}), ", end="")
    print(f"{requests} requests in each, {tokens} tokens for each of them")
    drafts = ", ".join(f"{name} {value:.2f}" for name, value in one.draft_ms.items())
    kept = ", ".join(f"{name} {count:.0f}" for name, count in one.accepted.items() if count)
    shares = ", ".join(f"{name} {100 * share:.0f}%" for name, share in one.acceptance.items())
    print(f"  draft calls, ms: {drafts or '-'}; accepted: {kept or '-'}, of those verified {shares or '-'}")
