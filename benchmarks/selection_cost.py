"""`flotilla bench selection`: what choosing the nodes to verify costs the scheduler, by policy."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks import environment, tables
from cluster.calibration import Calibration
from cluster.config import PolicyConfig
from cluster.cost_model import CostModel, CostProfile
from cluster.forest import Forest
from cluster.linear_cost import LinearCost
from cluster.policies.base import DecodeRequest, StepContext
from cluster.policies.registry import POLICIES, make_policy
from cluster.selection import marginal_goodput, slo_customized, throughput_optimized
from engine.tree import TokenTree

DRAFTERS = ("code", "chat", "summary")
# AdaServe's three classes on a target of 30 ms per token: 1.2x, 50 ms, 150 ms.
TPOTS_S = (0.036, 0.050, 0.150)
STEP_S = 0.030
DEPTH, WIDTH = 8, 8


@dataclass(frozen=True, slots=True)
class Setting:
    """A batch: requests, candidate nodes of each, and tokens of the verify step."""

    requests: int
    candidates: int
    budget: int


@dataclass(frozen=True, slots=True)
class SelectionTime:
    """Processor time of one piece of work in a setting.

    Attributes:
        setting: the batch.
        work: a policy's name, or the part of a selection measured.
        median_ms, p99_ms: over the repetitions.
        step_share: median over a step of 30 ms.
        selected: nodes chosen, roots included; 0 where the part chooses none.
    """

    setting: Setting
    work: str
    median_ms: float
    p99_ms: float
    step_share: float
    selected: int


def beam(rng: np.random.Generator, nodes: int) -> TokenTree:
    """A candidate tree as a beam search leaves it: eight wide, the draft probabilities of a fair drafter."""
    parent, logp, depth = [-1], [0.0], [0]
    above = [0]
    while len(parent) <= nodes:
        layer = []
        for _ in range(min(WIDTH, nodes + 1 - len(parent))):
            node = above[int(rng.integers(len(above)))]
            layer.append(len(parent))
            parent.append(node)
            logp.append(logp[node] + float(np.log(rng.beta(3.0, 1.2) * 0.98 + 0.01)))
            depth.append(depth[node] + 1)
        above = layer
    return TokenTree(
        token=rng.integers(0, 30000, len(parent)).astype(np.int32),
        parent=np.array(parent, dtype=np.int32),
        logp=np.array(logp, dtype=np.float32),
        depth=np.array(depth, dtype=np.int32),
    )


def batch_of(rng: np.random.Generator, count: int) -> list[DecodeRequest]:
    """Requests of the three classes somewhere in their decoding, most of them close to their objective."""
    requests = []
    for index in range(count):
        tpot_s, decoded = TPOTS_S[index % 3], int(rng.integers(4, 120))
        requests.append(
            DecodeRequest(
                request_id=f"request-{index}",
                drafter=DRAFTERS[index % 3],
                num_decoded=decoded,
                decoding_s=decoded * tpot_s * float(rng.uniform(0.9, 1.05)),
                tpot_s=tpot_s,
                max_draft=DEPTH,
                max_width=WIDTH,
                num_context=int(rng.integers(50, 500)),
                rate=0.7,
            )
        )
    return requests


def context_of(budget: int) -> StepContext:
    """Costs of a step of 30 ms in which the tokens of a budget take as long as everything else, so that
    policies that find their own budget end near it; and a calibration that has seen nothing yet."""
    target = LinearCost(alpha=1e-7, gamma=STEP_S / budget, delta=2e-2)
    drafters = {name: LinearCost(gamma=1e-6, delta=5e-4) for name in DRAFTERS}
    return StepContext(
        cost=CostModel(CostProfile(target=target, drafters=drafters)),
        calibration=Calibration(),
        step_s=STEP_S,
        draft_s=4e-3,
        plain_overhead_s=5e-4,
        draft_overhead_s=1e-3,
        step=1,
    )


def times_ms(work: Callable[[], object], repeats: int) -> np.ndarray:
    """Processor milliseconds of this thread, float64 [repeats]: others on the machine do not count."""
    for _ in range(3):
        work()
    gc.collect()
    measured = np.empty(repeats)
    for index in range(repeats):
        begun = time.thread_time_ns()
        work()
        measured[index] = (time.thread_time_ns() - begun) / 1e6
    return measured


def phases(
    batch: Sequence[DecodeRequest], trees: Sequence[TokenTree], context: StepContext, setting: Setting
) -> dict[str, Callable[[], np.ndarray]]:
    """The selection phases alone, from a forest and its path probabilities to the nodes chosen."""
    forest = Forest.of(trees)
    drafted = forest.path_product(forest.conditional)
    accepted = context.calibration.path_probabilities(forest, [request.drafter for request in batch])
    urgency = np.array([request.required(context.step_s) for request in batch])
    required = np.minimum(urgency, forest.depths + 1.0)
    max_nodes, token_s = PolicyConfig(name="adaserve").max_nodes, context.cost.verify_token_seconds()

    def two_phases() -> np.ndarray:
        chosen = slo_customized(forest, drafted, required, max_nodes, setting.budget, urgency)
        return throughput_optimized(chosen, drafted, setting.budget)

    def by_goodput() -> np.ndarray:
        chosen = slo_customized(forest, accepted, required, max_nodes, setting.budget)
        return marginal_goodput(chosen, accepted, STEP_S, token_s)

    return {"SLO + throughput (adaserve)": two_phases, "SLO + goodput (flotilla)": by_goodput}


def measure(setting: Setting, policies: Sequence[str], repeats: int, seed: int) -> list[SelectionTime]:
    """All figures of a setting: whole policies first, then parts."""
    rng = np.random.default_rng(seed)
    trees = [beam(rng, setting.candidates) for _ in range(setting.requests)]
    batch, context = batch_of(rng, setting.requests), context_of(setting.budget)

    def timed(work: str, run: Callable[[], object], selected: int) -> SelectionTime:
        measured = times_ms(run, repeats)
        middle, last = float(np.median(measured)), float(np.percentile(measured, 99))
        return SelectionTime(setting, work, middle, last, middle / 1e3 / STEP_S, selected)

    found = []
    for name in policies:
        config = PolicyConfig(name=name, max_depth=DEPTH, max_width=WIDTH, verify_budget=setting.budget)
        policy = make_policy(config)
        selected = sum(map(len, policy.select(batch, trees, context)))
        found.append(timed(name, partial(policy.select, batch, trees, context), selected))
    forest = Forest.of(trees)
    found.append(timed("forest of the trees", lambda: Forest.of(trees), 0))
    for name, run in phases(batch, trees, context, setting).items():
        found.append(timed(name, run, int(run().sum())))
    chosen = phases(batch, trees, context, setting)["SLO + throughput (adaserve)"]()
    found.append(timed("nodes by request", lambda: forest.chosen_nodes(chosen), 0))
    return found


def print_times(found: Sequence[SelectionTime]) -> None:
    """One table per setting."""
    heads = ["", "median ms", "p99 ms", "of a 30 ms step", "nodes chosen"]
    for setting in dict.fromkeys(entry.setting for entry in found):
        rows = [
            [
                entry.work,
                tables.number(entry.median_ms, 3),
                tables.number(entry.p99_ms, 3),
                f"{100 * entry.step_share:.2f}%",
                _selected(entry),
            ]
            for entry in found
            if entry.setting == setting
        ]
        tables.console.print(
            f"{setting.requests} requests, {setting.candidates} candidate nodes each, budget "
            f"{setting.budget:,}; each policy's whole selection, then the parts of one."
        )
        tables.console.print(tables.plain_table("", heads, rows))


def _selected(entry: SelectionTime) -> str:
    everything = entry.setting.requests * (entry.setting.candidates + 1)
    return "all" if entry.selected == everything else f"{entry.selected:,}" if entry.selected else ""


def run(
    policies: Sequence[str],
    requests: Sequence[int],
    candidates: int,
    budget: int,
    repeats: int,
    seed: int,
) -> dict[str, Any]:
    """Measure, print and return the JSON record; no policies means all.

    The budget goes with the first number of requests; the others get the same share of it per request.

    Raises:
        ValueError: for a policy that does not exist.
    """
    unknown = sorted(set(policies) - set(POLICIES))
    if unknown:
        raise ValueError(f"unknown policy {', '.join(unknown)}; known: {', '.join(sorted(POLICIES))}")
    found: list[SelectionTime] = []
    with tables.console.status("Measuring selection..."):
        for count in requests:
            setting = Setting(count, candidates, max(1, budget * count // requests[0]))
            found += measure(setting, policies or sorted(POLICIES), repeats, seed)
    print_times(found)
    return {
        "benchmark": "selection",
        "environment": environment.describe(),
        "clock": "processor time of the thread",
        "repeats": repeats,
        "times": [asdict(entry) for entry in found],
    }
