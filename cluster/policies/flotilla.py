"""Our default: objectives by chance constraint, calibrated acceptance, a budget found by marginal goodput."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.config import PolicyConfig
from cluster.forest import Forest
from cluster.policies.base import DecodeRequest, Int32, StepContext, clip
from cluster.policies.goodput import drafter_load
from cluster.policies.horizon import quantile
from cluster.policies.triage import MOST_CERTAIN_RATE, Float64, chain_rows, needs
from cluster.selection import marginal_goodput, slo_customized
from drafters.messages import DraftPlan
from engine.tree import TokenTree

# While speculation does not pay, one step in this many drafts all the same, as deep as usual, so that costs
# are known as they are now and it is noticed when it pays again.
PROBE_INTERVAL, PROBE_DEPTH = 64, 3
# Once drafting does not pay, it is not looked at again for so many steps, unless there are fewer requests
# than this share of them by then.
REST_STEPS, REST_WITH_OBJECTIVES = 16, 4
REST_SHARE = 0.8
# Drafts less likely accepted than this are not counted on when depth is planned.
LEAST_CHANCE = 0.1
# A drafter is cheap if drafting a token takes less than this share of verifying it, as looking it up does.
# What it proposes can all be drafted and the sure part verified: so often is that right.
CHEAP_SHARE, PRECISION = 0.25, 0.7
# Share of a drafter's wrong first choices where its second is right.
SECOND_CHOICE = 0.4
# Seconds of the scheduler's own work on each draft, which the overhead of a step, a mean over all sizes, does
# not show.
HANDLING_S = 5e-5
# For a request in need, drafting goes on down to a path of this chance.
URGENT_LOGP = math.log(0.2)
# Weight of the newest step in what is known of steps beside drafts and their verification.
SMOOTHING = 0.1
# Up to so many requests, depth is left to the drafter's confidence.
FEW_REQUESTS = 4
# A path surer than this is always worth a forward.
MOST_CERTAIN = 0.9
NO_DRAFT = DraftPlan(depth=0)


class Flotilla:
    """Speculates as deep and wide as raises expected tokens per second, and more where an SLO needs it."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._z = quantile(config.miss_probability)
        self._next_probe = 0
        self._rest_until = 0
        self._rest_requests = 0
        # What a batch needs is worked out once for drafting and selection.
        self._needed: tuple[list[DecodeRequest], float, Float64] = ([], 0.0, np.zeros(0))
        # Seconds of a step besides what was predicted of it (prompts, above all), and what was predicted.
        self._unseen_s = self._predicted_s = self._drafting_s = 0.0

    def rests(self, num_requests: int, step: int) -> bool:
        """Whether it was lately found that drafting does not pay, for no more requests than these."""
        return step < self._rest_until and num_requests >= self._rest_requests

    def plan(self, batch: Sequence[DecodeRequest], context: StepContext) -> list[DraftPlan]:
        """Depth by predicted goodput from acceptance rates and measured costs; width by AdaServe's rule."""
        if not batch:
            return []
        config, n = self._config, len(batch)
        width = clip(config.draft_budget / n + config.width_offset, 1, config.max_width)
        depth, goodput = self._best_depth(batch, 1, context)
        can_draft = any(request.max_draft > 0 for request in batch)
        need = self._needs(batch, context)
        is_urgent = bool((need > 1.0).any())
        if depth == 0 and not is_urgent and context.step >= self._next_probe and can_draft:
            self._next_probe = context.step + PROBE_INTERVAL
            return [DraftPlan(depth=min(PROBE_DEPTH, request.max_draft)) for request in batch]
        if depth == 0 and not is_urgent:
            # Few requests, or many that no drafter has read yet, are soon another matter.
            if n > FEW_REQUESTS and 2 * sum(request.max_draft > 0 for request in batch) > n:
                has_objectives = any(request.tpot_s is not None for request in batch)
                self._rest_until = context.step + (REST_WITH_OBJECTIVES if has_objectives else REST_STEPS)
                self._rest_requests = max(FEW_REQUESTS + 1, int(REST_SHARE * n))
            return [NO_DRAFT] * n
        # What the planned tokens cost on average: on this side of the roofline's knee they are nearly free.
        mean_context = sum(request.num_context for request in batch) / n
        least = goodput * float(context.cost.verify_added_seconds(n, n * max(1, depth), mean_context).mean())
        # A path less likely than this is not worth its token's time: the depth at which that is expected
        # bounds the plan, and drafting stops where the drafter itself finds it so.
        log_least = min(0.0, math.log(least)) if least > 0.0 else -math.inf
        rate = sum(request.rate for request in batch) / n
        if (1.0 - rate) * SECOND_CHOICE < least:
            width = 1  # too few second choices are right to pay for verifying them
        layer_s = {
            name: context.cost.draft_layer_seconds(name, count, width, tokens) / count
            for name, (count, tokens) in drafter_load(batch).items()
        }
        cheap = self._cheap(layer_s, context)
        rates = np.array([min(request.rate, MOST_CERTAIN_RATE) for request in batch])
        chains = chain_rows(rates, need).tolist()
        plans = []
        for request, required, chain in zip(batch, need.tolist(), chains, strict=True):
            # With few requests the drafter's own confidence bounds depth as it goes, and knows more than any
            # mean: a layer must be worth its tokens' time, and its forward's where it was not computed ahead.
            # With many, some are always sure enough, and a forward for those few costs nearly as much.
            own, rate, stop_logp = config.max_depth if n <= FEW_REQUESTS else depth, request.rate, log_least
            if request.drafter in cheap:
                own = config.max_depth  # its rate counts tokens for which it proposes nothing
            elif 0.0 < rate < 1.0 and least > 0.0:
                own = min(own, int(log_least / math.log(rate)))
            worth = goodput * layer_s.get(request.drafter, 0.0) / max(rate, 0.1)
            least_forward = math.log(min(worth, MOST_CERTAIN)) if worth > 0.0 else -math.inf
            if required > 1.0:
                # One token a step will not do for its objective: it may need tokens that do not pay.
                own, stop_logp = max(own, int(chain)), min(stop_logp, URGENT_LOGP)
                least_forward = min(least_forward, URGENT_LOGP)
            own = max(0, min(own, config.max_depth, request.max_draft))
            plans.append(
                DraftPlan(own, min(width, request.max_width), stop_logp, least_forward_logp=least_forward)
            )
        return plans

    def select(
        self, batch: Sequence[DecodeRequest], trees: Sequence[TokenTree], context: StepContext
    ) -> list[Int32]:
        """The SLO phase within the knee of the roofline, then nodes while they pay."""
        if not batch:
            return []
        forest = Forest.of(trees)
        drafters = [request.drafter for request in batch]
        probability = context.calibration.path_probabilities(forest, drafters)
        cost, n = context.cost, len(batch)
        budget = self._config.verify_budget or cost.knee(n)
        required = self._needs(batch, context)
        capped = np.minimum(required, forest.depths + 1.0)
        chosen = slo_customized(forest, probability, capped, self._config.max_nodes, budget)
        num_context = sum(request.num_context for request in batch)
        num_chosen = int(np.count_nonzero(chosen))
        verify_s = cost.verify_seconds(n, num_chosen, num_context, drafted=True)
        # Drafting is spent already, but it belongs to the step whose tokens per second are maximised.
        base = context.draft_s + context.draft_overhead_s + verify_s
        added = cost.verify_added_seconds(num_chosen, forest.num_nodes - num_chosen, num_context / n)
        chosen = marginal_goodput(chosen, probability, base, added)
        num_added = int(np.count_nonzero(chosen)) - num_chosen
        self._follow(base + float(added[:num_added].sum()), context)
        return forest.chosen_nodes(chosen)

    def _needs(self, batch: Sequence[DecodeRequest], context: StepContext) -> Float64:
        """What each request is to get from this step, by `triage.needs`."""
        before, step_s, found = self._needed
        if step_s == context.step_s and before == batch:
            return found
        beside_s = context.draft_overhead_s + self._drafting_s + self._unseen_s
        found = needs(batch, context, self._z, self._config.max_depth, beside_s)
        self._needed = (list(batch), context.step_s, found)
        return found

    def _follow(self, predicted_s: float, context: StepContext) -> None:
        """Compare steps with what was predicted of them; both are means over the recent ones."""
        if self._predicted_s == 0.0:
            self._predicted_s, self._drafting_s = predicted_s, context.draft_s
        unseen_s = max(0.0, context.step_s - self._predicted_s)
        self._unseen_s += SMOOTHING * (unseen_s - self._unseen_s)
        self._predicted_s += SMOOTHING * (predicted_s - self._predicted_s)
        self._drafting_s += SMOOTHING * (context.draft_s - self._drafting_s)

    def _best_depth(
        self, batch: Sequence[DecodeRequest], width: int, context: StepContext
    ) -> tuple[int, float]:
        """Depth with the highest predicted goodput (SmartSpec's objective) and that goodput."""
        n, deepest = len(batch), self._config.max_depth
        num_context = sum(request.num_context for request in batch)
        rates = np.array(
            [min(request.rate, MOST_CERTAIN_RATE) if request.drafter else 0.0 for request in batch]
        )
        limits = np.array([request.max_draft for request in batch])
        depths = np.arange(1, deepest + 1)[:, None]
        gain = np.where(limits >= depths, rates**depths, 0.0)  # [depths, requests]
        # Selection will drop drafts that have little chance this deep, and what cheap drafters are unsure of.
        worth = gain > LEAST_CHANCE
        load = drafter_load(batch)
        layer_s = {name: context.cost.draft_layer_seconds(name, 1, width) for name in load}
        cheap = self._cheap(layer_s, context)
        rows: NDArray[np.float64] | NDArray[np.bool_] = worth
        if cheap:
            is_cheap = np.array([request.drafter in cheap for request in batch])
            rows = worth * np.where(is_cheap, np.minimum(gain / PRECISION, 1.0), 1.0)
        # By depth from 0, as plain numbers: one is looked at after the other.
        expected = [float(n), *(n + (gain * worth).sum(axis=1).cumsum()).tolist()]
        drafted = [0.0, *rows.sum(axis=1).cumsum().tolist()]
        best_depth, best = 0, n / (context.cost.verify_seconds(n, n, num_context) + context.plain_overhead_s)
        for depth in range(1, deepest + 1):
            if drafted[depth] == drafted[depth - 1]:
                break
            draft_s = max(
                [
                    context.cost.draft_seconds(name, count, width, depth, tokens)
                    for name, (count, tokens) in load.items()
                ]
            )
            verify_s = context.cost.verify_seconds(n, n + round(drafted[depth]), num_context, drafted=True)
            step_s = draft_s + verify_s + context.draft_overhead_s + HANDLING_S * n
            goodput = expected[depth] / step_s
            if goodput > best:
                best_depth, best = depth, goodput
        return best_depth, best

    @staticmethod
    def _cheap(layer_s: dict[str, float], context: StepContext) -> set[str]:
        """Of these drafters, by seconds per request and layer, those that cost next to nothing."""
        most_s = CHEAP_SHARE * context.cost.verify_token_seconds()
        return {name for name, seconds in layer_s.items() if seconds < most_s}
