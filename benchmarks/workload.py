"""Benchmark requests: prompts mixed by class, with arrival times and objectives, from one seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arrivals import Arrivals, renewal_times, rescale, trace_times
from benchmarks.objectives import NO_SLO, NO_SLO_SPEC, Slo, SloSpec, spec_for
from benchmarks.prompts import Prompt


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request to send.

    Attributes:
        index: its place in the workload.
        prompt: what is asked.
        max_tokens: most tokens to generate.
        spec: objectives as given, perhaps relative.
        slo: objectives in milliseconds.
        arrival_s: when it is due, from the start; None in a closed loop.
    """

    index: int
    prompt: Prompt
    max_tokens: int
    spec: SloSpec = NO_SLO_SPEC
    slo: Slo = NO_SLO
    arrival_s: float | None = None

    @property
    def domain(self) -> str:
        """The class it is reported under."""
        return self.prompt.domain

    @property
    def is_chat(self) -> bool:
        """Whether it goes to the chat endpoint."""
        return self.prompt.messages is not None

    def content(self) -> dict[str, Any]:
        """The request body's part that holds the prompt."""
        if self.prompt.messages is not None:
            return {"messages": list(self.prompt.messages)}
        if self.prompt.token_ids is not None:
            return {"prompt": list(self.prompt.token_ids)}
        return {"prompt": self.prompt.text}


def parse_mix(text: str) -> dict[str, float]:
    """Shares by class from `code=60,chat=20,summary=20`, normalised.

    >>> parse_mix("code=3,chat=1")
    {'code': 0.75, 'chat': 0.25}
    """
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        try:
            share = float(value)
        except ValueError:
            share = -1.0
        if not equals or not name or not 0 <= share < float("inf"):
            raise ValueError(f"--mix {text}: {part.strip()!r} is not CLASS=SHARE")
        shares[name] = share
    total = sum(shares.values())
    if total <= 0:
        raise ValueError(f"--mix {text}: the shares sum to zero")
    return {name: share / total for name, share in shares.items() if share > 0}


def match_domain(name: str, domains: Sequence[str]) -> str:
    """The class a user means: its name, or a beginning that fits one class only (`summary`, `summ`)."""
    if name in domains:
        return name
    # `summary`, `summaries` and `summarization` are all in use for the same domain.
    fitting = [domain for domain in domains if domain.startswith(name[:5]) or name.startswith(domain)]
    if len(fitting) != 1:
        raise ValueError(f"no class {name!r} among the prompts' {', '.join(sorted(domains))}")
    return fitting[0]


def _apportion(shares: Mapping[str, float], count: int) -> dict[str, int]:
    """Whole numbers that sum to `count` and follow the shares (largest remainder)."""
    exact = {name: share * count for name, share in shares.items()}
    whole = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (whole[name] - exact[name], name))
    for name in by_remainder[: count - sum(whole.values())]:
        whole[name] += 1
    return whole


def mix_prompts(
    prompts: Sequence[Prompt], count: int, shares: Mapping[str, float] | None, rng: np.random.Generator
) -> list[Prompt]:
    """`count` prompts in random order, in exactly the given shares (or the source's own, for None).

    Each class is drawn without replacement; when it runs out it starts over in a new order.
    """
    by_domain: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_domain.setdefault(prompt.domain, []).append(prompt)
    if shares is None:
        wanted = _apportion({name: len(held) / len(prompts) for name, held in by_domain.items()}, count)
    else:
        named = {match_domain(name, list(by_domain)): share for name, share in shares.items()}
        wanted = _apportion(named, count)
    chosen: list[Prompt] = []
    for domain in sorted(wanted):
        held, missing = by_domain[domain], wanted[domain]
        while missing > 0:
            order = rng.permutation(len(held))[:missing]
            chosen += [held[place] for place in order]
            missing -= len(order)
    return [chosen[place] for place in rng.permutation(len(chosen))]


def arrival_times(
    prompts: Sequence[Prompt],
    process: Arrivals,
    rate: float | None,
    burstiness: float,
    trace: Path | None,
    rng: np.random.Generator,
) -> list[float] | None:
    """When each request is due, or None in a closed loop."""
    if rate is not None and not rate > 0:
        raise ValueError(f"the request rate must be positive, not {rate}")
    count = len(prompts)
    if process is Arrivals.closed:
        return None
    if process is Arrivals.workload:
        if any(prompt.arrival_s is None for prompt in prompts):
            raise ValueError("these prompts carry no arrival times; choose another --arrivals")
        return rescale([prompt.arrival_s or 0.0 for prompt in prompts], rate)
    if process is Arrivals.trace:
        if trace is None:
            raise ValueError("--arrivals trace needs --trace FILE")
        times = trace_times(trace)
        if len(times) < count:
            raise ValueError(f"{trace} holds {len(times)} arrivals, fewer than {count} requests")
        return rescale(times[:count], rate)
    if rate is None:
        raise ValueError(f"--arrivals {process} needs --request-rate")
    shape = {Arrivals.poisson: 1.0, Arrivals.constant: float("inf")}.get(process, burstiness)
    return renewal_times(count, rate, shape, rng)


def build(
    prompts: Sequence[Prompt],
    *,
    count: int | None = None,
    shares: Mapping[str, float] | None = None,
    arrivals: Arrivals = Arrivals.closed,
    rate: float | None = None,
    burstiness: float = 1.0,
    trace: Path | None = None,
    slos: Mapping[str, SloSpec] | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
) -> list[BenchRequest]:
    """The requests of a run; the same arguments give the same requests.

    A workload that carries its own arrival times keeps its order and is cut to the first `count`.
    `max_tokens` bounds every request; without it a prompt's own bound holds, else 128.
    """
    # Separate streams: another rate must not change which prompts are asked.
    mix_rng, arrival_rng = (np.random.default_rng((seed, stream)) for stream in (0, 1))
    if arrivals is Arrivals.workload:
        chosen = list(prompts[:count])
    else:
        chosen = mix_prompts(prompts, count or len(prompts), shares, mix_rng)
    times = arrival_times(chosen, arrivals, rate, burstiness, trace, arrival_rng)
    domains = sorted({prompt.domain for prompt in prompts})
    specs = {
        domain if domain == "*" else match_domain(domain, domains): spec
        for domain, spec in (slos or {}).items()
    }
    requests = []
    for index, prompt in enumerate(chosen):
        requests.append(
            BenchRequest(
                index=index,
                prompt=prompt,
                max_tokens=bound_of(prompt, max_tokens),
                spec=spec_for(prompt.domain, specs, prompt.slo),
                arrival_s=None if times is None else times[index],
            )
        )
    return requests


def bound_of(prompt: Prompt, max_tokens: int | None) -> int:
    """Most tokens of an answer: the prompt's own bound, no more than `max_tokens`; 128 where neither says."""
    return min((bound for bound in (prompt.max_tokens, max_tokens) if bound is not None), default=128)


def not_asked(
    prompts: Sequence[Prompt], requests: Sequence[BenchRequest], max_tokens: int | None
) -> list[BenchRequest]:
    """Requests for the prompts that `requests` do not ask, of the same classes, in the prompts' order."""
    asked = {id(request.prompt) for request in requests}
    domains = {request.domain for request in requests}
    left = [prompt for prompt in prompts if id(prompt) not in asked and prompt.domain in domains]
    return [BenchRequest(index, prompt, bound_of(prompt, max_tokens)) for index, prompt in enumerate(left)]


def with_slos(requests: Sequence[BenchRequest], baselines: Mapping[str, Slo]) -> list[BenchRequest]:
    """The requests with absolute objectives, given each class's baseline latency."""
    return [replace(request, slo=request.spec.resolve(baselines.get(request.domain))) for request in requests]
