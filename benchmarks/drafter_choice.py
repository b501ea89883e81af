"""How soon a cell learns which drafter suits which prompt: the real drafter pool on a table of scores.

python -m benchmarks.drafter_choice --scores scores.json --json choice.json

The target answers every held-out prompt of the demo family once and every drafter reads the answers. Then
the prompts arrive one after the other in random orders, and a rule assigns drafters knowing only what it has
seen. The global mean is the rule this project began with: a drafter's mean over all requests, and others
scored when they could be 0.05 better.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.drafter_scores import DrafterScores, ScoredPrompt, load_or_measure
from benchmarks.environment import describe
from benchmarks.greedy_choice import Candidate, choose, goodput
from benchmarks.tables import console, number, percent, plain_table
from cluster.cost_model import CostModel
from cluster.drafter_pool import DrafterPool
from cluster.requests import Request
from cluster.stream_messages import Submit
from drafters.messages import Draft, DraftResult
from engine.sampling_params import SamplingParams
from engine.tree import TokenTree

MAX_DEPTH = 6
# Requests seen at the ends of the stages that are reported.
STAGES = (20, 50, 100, 200)
# A drafter whose goodput on a prompt is within this of another's is as good a choice.
TOLERANCE = 0.02


class Rule(Protocol):
    """A way to assign drafters that learns from what it assigned."""

    @property
    def num_explorations(self) -> int:
        """Drafters scored on requests they did not serve."""
        ...

    def serve(self, number: int, prompt: ScoredPrompt) -> str:
        """Assign a drafter, then see the answer, and what other drafters it asks make of it."""
        ...


class PoolRule:
    """The cell's own pool; every exploration is answered before the next prompt comes."""

    def __init__(self, scores: DrafterScores, *, is_busy: bool) -> None:
        self._pool = DrafterPool(CostModel(scores.profile), MAX_DEPTH)
        self._is_busy = is_busy
        for name, capabilities in scores.drafters.items():
            self._pool.add(name, capabilities, 64)

    @property
    def num_explorations(self) -> int:
        """Drafters scored on requests they did not serve."""
        return self._pool.explorer.num_explorations

    def serve(self, number: int, prompt: ScoredPrompt) -> str:
        """Assign at admission; then the request is done in a single step."""
        pool = self._pool
        sampling = SamplingParams(temperature=0.0, max_tokens=len(prompt.answer))
        submit = Submit(request_id=str(number), prompt=prompt.prompt, sampling=sampling)
        request = Request(submit, "replay", 0.0, number)
        pool.assign([request], 0.0)
        request.output, request.num_steps = list(prompt.answer), 1
        chosen = request.drafter
        if chosen:  # else it is decoded without a drafter
            pool.score(request.request_id, chosen, prompt.scored[chosen], prompt.agreed[chosen])
        asked = pool.explorer.final(request, 0.0, is_busy=self._is_busy)
        pool.forget(request)
        for name, call in asked:
            draft = Draft(
                request_id=request.request_id,
                tree=TokenTree.root_only(prompt.answer[-1]),
                num_scored=prompt.scored[name],
                num_agreed=prompt.agreed[name],
            )
            pool.answered(name, DraftResult(call_id=call.call_id, drafts=[draft]), 0.0)
        return chosen


class GlobalMeanRule:
    """Each drafter's mean over all requests, which starts at 0.7 (without a model 0.3) worth 20 tokens."""

    def __init__(self, scores: DrafterScores, *, is_busy: bool) -> None:
        self._scores, self._is_busy = scores, is_busy
        self._mean = {
            name: 0.7 if capabilities.has_probabilities else 0.3
            for name, capabilities in scores.drafters.items()
        }
        self._seen = dict.fromkeys(self._mean, 20.0)
        self.num_explorations = 0

    def serve(self, number: int, prompt: ScoredPrompt) -> str:
        """Assign by the means alone; then one drafter that could be better than this request's is scored."""
        costs = step_costs(self._scores, prompt)
        candidates = [candidate(self._scores, name, rate) for name, rate in self._mean.items()]
        chosen = choose(candidates, "", *costs)
        self._observe(chosen, prompt)
        if not self._is_busy:
            here = (6.0 * self._mean[chosen] + prompt.agreed[chosen]) / (6.0 + prompt.scored[chosen])
            hopes = [
                (goodput(candidate(self._scores, name, min(1.0, rate + 0.05)), *costs), name)
                for name, rate in self._mean.items()
                if name != chosen
            ]
            value, name = max(hopes, default=(0.0, ""))
            if value > goodput(candidate(self._scores, chosen, here), *costs):
                self._observe(name, prompt)
                self.num_explorations += 1
        return chosen

    def _observe(self, name: str, prompt: ScoredPrompt) -> None:
        scored = prompt.scored[name]
        if scored:
            weight = max(scored / (self._seen[name] + scored), min(1.0, 0.003 * scored))
            self._mean[name] += weight * (prompt.rate(name) - self._mean[name])
            self._seen[name] += scored


def step_costs(scores: DrafterScores, prompt: ScoredPrompt) -> tuple[float, float, int]:
    """What `goodput` needs besides a candidate."""
    cost, context = CostModel(scores.profile), len(prompt.prompt)
    return cost.verify_seconds(1, 1, context), cost.verify_token_seconds(context), MAX_DEPTH


def candidate(scores: DrafterScores, name: str, rate: float) -> Candidate:
    """A drafter with room, at a rate."""
    draft_s = CostModel(scores.profile).draft_seconds(name, 1, 1, 1)
    return Candidate(name=name, rate=rate, draft_s=draft_s, load=0, capacity=1)


def goodputs(scores: DrafterScores) -> NDArray[np.float64]:
    """float64 [prompts, drafters], tokens per second at the best depth and the rate found on the prompt."""
    return np.array(
        [
            [
                # An answer without an error is not proof of a drafter without any.
                goodput(candidate(scores, name, min(prompt.rate(name), 0.99)), *step_costs(scores, prompt))
                for name in scores.drafters
            ]
            for prompt in scores.prompts
        ]
    )


@dataclass(frozen=True)
class Stage:
    """A rule's choices between two numbers of requests seen.

    Attributes:
        rule, first, last: which, and where.
        suited: by domain, share of prompts given the domain's best drafter or one as good on the prompt.
        best: share given the prompt's own best drafter (known in hindsight only) or one as good.
        regret: goodput lost to the prompt's own best drafter, as a share.
        regret_to_domain: goodput lost to always taking the domain's best drafter, as a share.
        explorations: drafters scored on requests they did not serve, per request, since the start.
    """

    rule: str
    first: int
    last: int
    suited: dict[str, float]
    best: float
    regret: float
    regret_to_domain: float
    explorations: float


def replay(
    scores: DrafterScores,
    rules: dict[str, type[PoolRule] | type[GlobalMeanRule]],
    orders: int,
    *,
    is_busy: bool = False,
) -> list[Stage]:
    """Serve the prompts in `orders` random orders by each rule; `is_busy` if the cell is never idle."""
    plain = [1.0 / step_costs(scores, prompt)[0] for prompt in scores.prompts]
    table, names = np.column_stack([goodputs(scores), plain]), [*scores.drafters, ""]
    domains = np.array([prompt.domain for prompt in scores.prompts])
    kinds = sorted(set(domains.tolist()))
    favourite = {kind: int(table[domains == kind].mean(axis=0).argmax()) for kind in kinds}
    by_domain = table[np.arange(len(table)), [favourite[kind] for kind in domains]]
    ends = [0, *(stage for stage in STAGES if stage < len(table)), len(table)]
    stages = []
    for rule_name, make in rules.items():
        chosen = np.zeros((orders, len(table)), dtype=np.int64)
        prompts = np.array([np.random.default_rng(seed).permutation(len(table)) for seed in range(orders)])
        explored = np.zeros((orders, len(table)))
        for row in range(orders):
            rule: Rule = make(scores, is_busy=is_busy)
            for place, index in enumerate(prompts[row]):
                chosen[row, place] = names.index(rule.serve(place, scores.prompts[index]))
                explored[row, place] = rule.num_explorations
        for first, last in pairwise(ends):
            at, picked = prompts[:, first:last], chosen[:, first:last]
            value = table[at, picked]
            is_suited = value >= (1.0 - TOLERANCE) * by_domain[at]
            stages.append(
                Stage(
                    rule=rule_name,
                    first=first + 1,
                    last=last,
                    suited={kind: float(is_suited[domains[at] == kind].mean()) for kind in kinds},
                    best=float((value >= (1.0 - TOLERANCE) * table.max(axis=1)[at]).mean()),
                    regret=1.0 - float(value.sum() / table.max(axis=1)[at].sum()),
                    regret_to_domain=1.0 - float(value.sum() / by_domain[at].sum()),
                    explorations=float(explored[:, last - 1].mean()) / last,
                )
            )
    return stages


def main(argv: Sequence[str] | None = None) -> None:
    """Measure or load the scores, replay, print a table, write JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scores", type=Path, help="file of scores; measured and written if there is none")
    parser.add_argument("--orders", type=int, default=20, help="random orders of the prompts")
    parser.add_argument("--busy", action="store_true", help="as if there was no idle time to explore in")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args(argv)
    scores = load_or_measure(args.scores)
    rules: dict[str, type[PoolRule] | type[GlobalMeanRule]] = {
        "global mean": GlobalMeanRule,
        "prior": PoolRule,
    }
    stages = replay(scores, rules, args.orders, is_busy=args.busy)
    kinds = list(stages[0].suited)
    rows = [
        [
            stage.rule,
            f"{stage.first}-{stage.last}",
            *(percent(stage.suited[kind]) for kind in kinds),
            percent(stage.best),
            percent(stage.regret),
            percent(stage.regret_to_domain),
            number(stage.explorations, 2),
        ]
        for stage in stages
    ]
    heads = ["rule", "requests", *(f"suited: {kind}" for kind in kinds)]
    heads += ["best", "regret", "to domain's best", "explored"]
    console.print(plain_table(f"Choice of a drafter, mean of {args.orders} orders", heads, rows))
    if args.json is not None:
        figures = {
            "benchmark": "drafter choice",
            "environment": describe(),
            "busy": args.busy,
            "stages": [asdict(stage) for stage in stages],
        }
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
