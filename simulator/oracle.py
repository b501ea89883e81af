"""Policies that only the simulator can run: one that knows the texts, and one with a part left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cluster.config import PolicyConfig
from cluster.policies.adaserve import AdaServe
from cluster.policies.base import DecodeRequest, Int32, StepContext, all_nodes
from cluster.selection import Bool, Float64
from drafters.messages import DraftPlan
from engine.tree import TokenTree
from simulator import systems
from simulator.scripts import Scripts
from simulator.systems import Bounds, SimulatedPolicy, System
from simulator.workers import SimulatedDrafter


class Oracle:
    """Chains of known acceptance: drafts exactly what will be accepted, as deep as goodput is highest.

    It knows how many of a drafter's first choices in a row are the target's, drafts no token beyond those,
    and verifies nothing that is rejected. Of all depths it takes the one with the most tokens per second of
    the step. So it is what choosing lengths can come to with chains; trees, which accept second choices, and
    choices for the sake of objectives may do better.
    """

    def __init__(
        self, config: PolicyConfig, scripts: Scripts, drafters: Mapping[str, SimulatedDrafter]
    ) -> None:
        self._config, self._scripts, self._drafters = config, scripts, drafters

    def plan(self, batch: Sequence[DecodeRequest], context: StepContext) -> list[DraftPlan]:
        """As deep as each request's drafts will be accepted, up to the depth of highest goodput."""
        if not batch:
            return []
        runs = np.array([self._run(request) for request in batch])
        num_context = sum(request.num_context for request in batch)
        best, best_goodput = 0, 0.0
        draft_s = 0.0
        for depth in range(int(runs.max()) + 1):
            overhead = context.draft_overhead_s if depth else context.plain_overhead_s
            if depth:
                drafting = [r for r, most in zip(batch, runs.tolist(), strict=True) if most >= depth]
                of_all = sum(request.num_context for request in drafting)
                draft_s += context.cost.draft_layer_seconds(drafting[0].drafter, len(drafting), 1, of_all)
            num_tokens = len(batch) + int(np.minimum(runs, depth).sum())
            verify_s = context.cost.verify_seconds(len(batch), num_tokens, num_context, drafted=depth > 0)
            goodput = num_tokens / (draft_s + verify_s + overhead)
            if goodput > best_goodput:
                best, best_goodput = depth, goodput
        return [DraftPlan(depth=min(best, most), width=1) for most in runs.tolist()]

    def select(
        self, batch: Sequence[DecodeRequest], trees: Sequence[TokenTree], context: StepContext
    ) -> list[Int32]:
        """Everything: it will be accepted."""
        return all_nodes(trees)

    def _run(self, request: DecodeRequest) -> int:
        """How many first choices from here on are right, up to what may be drafted."""
        held = self._drafters.get(request.drafter)
        most = min(request.max_draft, self._config.max_depth)
        if held is None or most <= 0 or request.request_id not in self._scripts:
            return 0
        script = self._scripts[request.request_id]
        position = request.num_context - script.prompt_len
        start = self._scripts.row(script, held.table) + position
        most = min(most, script.num_output - position)
        agreed = held.table.agreed[start : start + most + 1]
        wrong = np.flatnonzero(np.diff(agreed) == 0)
        return int(wrong[0]) if len(wrong) else max(0, most)


class SloPhaseOnly(AdaServe):
    """AdaServe without its throughput-optimized phase (EuroSys 2026, figure 16, the second bar)."""

    def __init__(
        self, config: PolicyConfig, scripts: Scripts, drafters: Mapping[str, SimulatedDrafter]
    ) -> None:
        super().__init__(config)

    def _fill(self, chosen: Bool, probability: Float64, budget: int) -> Bool:
        """Nothing more: the rest of the budget stays unused."""
        return chosen


# By the name of the system.
_POLICIES: Mapping[str, SimulatedPolicy] = {"oracle": Oracle, "adaserve-slo-phase": SloPhaseOnly}


def parse(text: str, bounds: Bounds | None = None) -> System:
    """A system as `simulator.systems.parse` reads it, or one with a policy of this module.

    Those batch as `adaserve` does, or as named: `oracle/flotilla`.

    Raises:
        ValueError: for a name that is none of these.
    """
    name, slash, rule = text.partition("/")
    own = _POLICIES.get(name)
    parsed = systems.parse(f"adaserve{slash}{rule}" if own is not None else text, bounds)
    return System(text, parsed.config, own)
