"""The requests of a comparison: the same for every policy, from a seed and a point of the sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import GenerationConfig

from benchmarks import workload
from benchmarks.arrivals import Arrivals, category_peaks, rescale
from benchmarks.compare_plan import Point
from benchmarks.objectives import NO_SLO_SPEC, Limit, Slo, SloSpec
from benchmarks.prompts import Prompt
from benchmarks.workload import BenchRequest
from deployments.tokenizer_loading import load_tokenizer

# AdaServe's mix and objectives (EuroSys 2026, table 2). Its 50 and 150 ms are 1.5 and 4.5 times the baseline
# latency if 1.2 times it is the 40 ms that the paper says its urgent objective aligns with.
DEFAULT_MIX = "code=60,chat=20,summary=20"
DEFAULT_SLOS = ("code:1.2x", "chat:1.5x", "summary:4.5x")
# Fewer requests than this say nothing about attainment.
LEAST_REQUESTS = 12


@dataclass(frozen=True, slots=True)
class Traffic:
    """What requests are made from.

    Attributes:
        prompts: tokenized.
        shares: by class; None keeps the prompts' own.
        slos: by class; those that came with the prompts hold where it names none.
        urgent: the class whose share and objective are swept.
        start_s: where in a workload with its own arrivals to begin.
        duration_s: seconds of arrivals; None takes a workload with its own arrivals to its end.
        num_requests: this many instead.
        max_tokens: bound on every answer.
        peaks: classes peak one after the other (AdaServe figure 13).
    """

    prompts: Sequence[Prompt]
    shares: Mapping[str, float] | None
    slos: Mapping[str, SloSpec]
    urgent: str
    start_s: float
    duration_s: float | None
    num_requests: int | None
    max_tokens: int | None
    peaks: bool

    @property
    def has_arrivals(self) -> bool:
        """Whether requests arrive when their source says so."""
        return self.shares is None and not self.peaks and all(p.arrival_s is not None for p in self.prompts)


class Texts:
    """Tokenizer and end tokens of the target."""

    def __init__(self, directory: str) -> None:
        self._tokenizer: Any = load_tokenizer(Path(directory))
        end = GenerationConfig.from_pretrained(directory).eos_token_id
        self.end_tokens: tuple[int, ...] = tuple(end) if isinstance(end, list) else (end,)

    def encode(self, prompt: Prompt) -> Prompt:
        """The prompt as the tokens a server would make of it."""
        if prompt.token_ids is not None:
            return prompt
        if prompt.messages is None:
            # Not verbose: what is too long for the model is said once, for all prompts.
            tokens = self._tokenizer(prompt.text, verbose=False)["input_ids"]
        else:
            tokens = self._tokenizer.apply_chat_template(
                list(prompt.messages), add_generation_prompt=True, return_dict=True
            )["input_ids"]
        return replace(prompt, text=None, messages=None, token_ids=tuple(tokens))


def those_that_fit(prompts: Sequence[Prompt], max_tokens: int) -> list[Prompt]:
    """Prompts that leave room for an answer's first token in a context of `max_tokens`."""
    return [prompt for prompt in prompts if len(prompt.token_ids or ()) < max_tokens]


def has_objectives(prompts: Sequence[Prompt]) -> bool:
    """Whether the prompts bring objectives of their own."""
    return any(prompt.slo != NO_SLO_SPEC for prompt in prompts)


def with_urgent_share(shares: Mapping[str, float], urgent: str, share: float) -> dict[str, float]:
    """The shares with the urgent class at `share` and the others in their old proportion."""
    rest = 1.0 - shares[urgent]
    return {
        name: share if name == urgent else (1.0 - share) * old / rest if rest > 0 else 0.0
        for name, old in shares.items()
    }


def own_shares(prompts: Sequence[Prompt]) -> dict[str, float]:
    """How the classes are represented among the prompts."""
    names = [prompt.domain for prompt in prompts]
    return {name: names.count(name) / len(names) for name in dict.fromkeys(names)}


def requests_for(
    traffic: Traffic, point: Point, rate: float | None, seed: int, baselines: Mapping[str, Slo]
) -> list[BenchRequest]:
    """The requests of a run, with absolute objectives, by time of arrival.

    Args:
        traffic: what they are made from.
        point: the point of the sweep.
        rate: requests per second; None leaves a workload's own arrivals as they are.
        seed: of the round.
        baselines: latencies that relative objectives are multiples of, by class.
    """
    shares = traffic.shares
    if point.urgent_share is not None:
        shares = with_urgent_share(shares or own_shares(traffic.prompts), traffic.urgent, point.urgent_share)
    slos = dict(traffic.slos)
    if point.slo_scale is not None:
        slos[traffic.urgent] = SloSpec(tpot=Limit(point.slo_scale, relative=True))
    own_arrivals = traffic.has_arrivals and shares is None
    count = traffic.num_requests
    if count is None and not own_arrivals:
        if rate is None or traffic.duration_s is None:
            raise ValueError("these prompts carry no arrival times: a rate and a duration are needed")
        count = max(LEAST_REQUESTS, round(rate * traffic.duration_s))
    process = Arrivals.workload if own_arrivals else Arrivals.poisson
    prompts = _part_of(traffic, rate) if own_arrivals else traffic.prompts
    requests = workload.build(
        prompts,
        count=None if own_arrivals else count,
        shares=shares,
        arrivals=Arrivals.closed if traffic.peaks else process,
        rate=rate,
        # A part of a workload may have none of a class.
        slos={name: slo for name, slo in slos.items() if name in {"*", *own_shares(prompts)}},
        max_tokens=traffic.max_tokens,
        seed=seed,
    )
    if own_arrivals:
        since_start_s = [(prompt.arrival_s or 0.0) - traffic.start_s for prompt in prompts]
        moments = zip(requests, rescale(since_start_s, rate), strict=True)
        requests = [replace(request, arrival_s=time) for request, time in moments]
    if traffic.peaks:
        if rate is None:
            raise ValueError("classes that peak need a rate")
        times = category_peaks(
            [request.domain for request in requests], len(requests) / rate, np.random.default_rng((seed, 4))
        )
        timed = (replace(request, arrival_s=time) for request, time in zip(requests, times, strict=True))
        requests = sorted(timed, key=lambda request: request.arrival_s or 0.0)
    return workload.with_slos(requests, baselines)


def _part_of(traffic: Traffic, rate: float | None) -> list[Prompt]:
    """The prompts of a workload with arrivals that are asked in a run, by time, from its start on.

    With a rate as many as arrive in the run's time at that rate. Else a part that is busier than the whole,
    or less busy, as its first minute is, would come at another rate than was asked for.
    """

    def since_start_s(prompt: Prompt) -> float:
        return (prompt.arrival_s or 0.0) - traffic.start_s

    found = sorted((one for one in traffic.prompts if since_start_s(one) >= 0.0), key=since_start_s)
    if traffic.duration_s is not None and rate is not None:
        found = found[: 1 + round(rate * traffic.duration_s)]
    elif traffic.duration_s is not None:
        found = [one for one in found if since_start_s(one) <= traffic.duration_s]
    if not found:
        raise ValueError(f"nothing arrives from second {traffic.start_s:g} of the workload on")
    return found[: traffic.num_requests]


def warmup_requests(traffic: Traffic, count: int, seed: int) -> list[BenchRequest]:
    """Requests without objectives and arrival times, of all classes, to be sent before measuring.

    Their answers are as long as those measured: saturation, of which rates are shares, is found with such.
    """
    rng = np.random.default_rng((seed, 5))
    prompts = workload.mix_prompts(traffic.prompts, count, traffic.shares, rng)
    return [
        BenchRequest(index, prompt, workload.bound_of(prompt, traffic.max_tokens))
        for index, prompt in enumerate(prompts)
    ]
