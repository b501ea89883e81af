"""How deep and wide each request is drafted for, once it is known that drafts pay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.policies.base import StepContext
from cluster.policies.decode_batch import DecodeBatch
from cluster.policies.rest import FEW_REQUESTS
from cluster.policies.triage import Float64, chain_rows
from drafters.messages import DraftPlan

# A drafter is cheap if drafting a token takes less than this share of verifying it, as looking it up does.
CHEAP_SHARE = 0.25
# For a request in need, drafting goes on down to a path of this chance.
URGENT_LOGP = math.log(0.2)
# A layer whose forward is worth fewer tokens is drafted however unsure: how seldom such paths come true is
# not known.
LEAST_WORTH = 0.1
# A path surer than this is always worth a forward.
MOST_CERTAIN = 0.9


def cheap(layer_s: Mapping[str, float], context: StepContext) -> set[str]:
    """Of these drafters, by seconds per request and layer, those that cost next to nothing."""
    # Of a mixture, a token costs most where there are few: that is what few requests are drafted for at.
    rows = FEW_REQUESTS + context.prompt_rows
    most_s = CHEAP_SHARE * context.cost.verify_token_seconds(num_tokens=rows)
    return {name for name, seconds in layer_s.items() if seconds < most_s}


@dataclass(frozen=True, slots=True)
class DraftShapes:
    """What the drafts of one step have in common.

    Attributes:
        depth: deepest of them.
        width: nodes of a layer.
        goodput: tokens that a second is worth.
        least: tokens that verifying one more costs: a path less likely than this is not worth its time.
    """

    depth: int
    width: int
    goodput: float
    least: float

    def plans(
        self, batch: DecodeBatch, need: Float64, is_urgent: bool, context: StepContext
    ) -> list[DraftPlan]:
        """A plan for each request of the batch.

        The depth at which a path of `least` is expected bounds the plan, and drafting stops where the drafter
        itself finds it so: its confidence knows more than any mean. A layer must be worth its tokens' time,
        and its forward's where it was not computed ahead. With many requests some are always sure enough, and
        a forward for those few costs nearly as much: see `Flotilla.stop_rule`.

        Args:
            batch: the requests.
            need: tokens that each is to get from this step.
            is_urgent: whether some need more than one, and are drafted for also where it does not pay.
            context: costs above all.
        """
        n, log, cost, load = len(batch), math.log, context.cost, batch.load
        log_least = min(0.0, log(self.least)) if self.least > 0.0 else -math.inf
        chains = chain_rows(batch.rates, need).tolist() if is_urgent else [0.0] * n
        # Beside a greedy target a drafter's choices are right more often than it says.
        exponents = {name: context.calibration.of(name).exponent for name in load}
        are_few = n <= FEW_REQUESTS
        layer_s: dict[str, float] = {}
        inexpensive: set[str] = set()
        lookups: set[str] = set()
        if are_few:
            layer_s = {
                name: cost.draft_layer_seconds(name, count, self.width, tokens) / count
                for name, (count, tokens) in load.items()
            }
            inexpensive = cheap(layer_s, context)
            # A lookup is cheap for one request too; a small model is only when several share its forward.
            lookups = cheap({name: cost.draft_layer_seconds(name, 1, self.width) for name in load}, context)
        plans = []
        for request, required, chain in zip(batch, need.tolist(), chains, strict=True):
            own, rate, name = self.depth, request.rate, request.drafter
            exponent = exponents.get(name, 1.0)
            stop_logp = log_least / exponent
            # A lookup's rate counts tokens for which it proposes nothing. What a model drafts beyond the
            # depth that pays gives the SLO phase more to choose from; without objectives it is wasted.
            is_free = name in lookups or (name in inexpensive and request.tpot_s is not None)
            if are_few and not is_free and 0.0 < rate < 1.0 and self.least > 0.0:
                reach = int(log_least / log(rate))
                own = reach if reach < own else own
            worth = self.goodput * layer_s.get(name, 0.0) / (rate if rate > 0.1 else 0.1)
            least_forward = -math.inf
            if worth > LEAST_WORTH:
                least_forward = log(worth if worth < MOST_CERTAIN else MOST_CERTAIN) / exponent
            if required > 1.0:
                # One token a step will not do for its objective: it may need tokens that do not pay.
                own, stop_logp = max(own, int(chain)), min(stop_logp, URGENT_LOGP)
                least_forward = min(least_forward, URGENT_LOGP)
            most, widest = request.max_draft, request.max_width
            own = most if most < own else own
            own = self.depth if self.depth < own else own
            # By position, which takes half as long.
            plans.append(
                DraftPlan(
                    own if own > 0 else 0,
                    self.width if self.width < widest else widest,
                    stop_logp,
                    -math.inf,
                    least_forward,
                )
            )
        return plans
