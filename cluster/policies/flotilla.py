"""Our default: objectives by chance constraint, calibrated acceptance, a budget found by marginal goodput."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from cluster.config import PolicyConfig
from cluster.forest import Forest
from cluster.phase_trace import is_tracing
from cluster.policies.base import DecodeRequest, Int32, StepContext, clip
from cluster.policies.decode_batch import DecodeBatch
from cluster.policies.depth_tokens import tokens_by_depth
from cluster.policies.draft_shapes import DraftShapes, cheap
from cluster.policies.horizon import quantile
from cluster.policies.on_time import num_on_time
from cluster.policies.outlook import Outlook
from cluster.policies.probing import LEAST_INTERVAL, PROBE_RUN, Probing
from cluster.policies.realised import Realised
from cluster.policies.rest import FEW_REQUESTS, Rest, with_objectives
from cluster.policies.step_seconds import added_by_drafts, drafted_step_s, plain_at_best, spent_on_prompts
from cluster.policies.triage import Float64, needs
from cluster.selection import marginal_goodput, slo_customized
from cluster.selection_of_few import FEW_NODES, by_tree, paying, urgent
from drafters.messages import DraftPlan
from engine.stop_rules import ForwardRule
from engine.tree import TokenTree
from engine.tree_batch import TreeBatch

# While speculation does not pay, some steps draft all the same, as deep as usual, so that costs are known as
# they are now and it is noticed when it pays again.
PROBE_DEPTH = 3
# And while it pays, some do not draft, unless it is believed to bring this many times as much.
SURELY_PAYS = 2.0
# A try of plain steps has at most so many times as many steps as one of drafts.
MOST_PLAIN = 4.0
# Of more than a few requests drafters must read some anew after plain steps, and bring less until then: who
# drafts goes on while it brings this share of what plain steps would.
STILL_PAYS = 0.92
# Share of a drafter's wrong first choices where its second is right.
SECOND_CHOICE = 0.4
# Of goodput no larger share is given up by drafting for those in need.
MOST_LOST = 0.02
# Nor than this where that keeps more requests on time.
MOST_LOST_IN_TIME = 0.1
# Of goodput up to this share is given up by not drafting, where plain steps keep more requests on time.
MOST_FORGONE = 0.25
# Weight of the newest step in what is known of steps beside drafts and their verification.
SMOOTHING = 0.1
NO_DRAFT = DraftPlan(depth=0)


class Flotilla:
    """Speculates as deep and wide as raises expected tokens per second, and more where an SLO needs it."""

    plans_ahead = True

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._z = quantile(config.miss_probability)
        self._try_drafts, self._try_plain = Probing(), Probing(LEAST_INTERVAL)
        self._rest = Rest()
        self._paid = False  # whether drafts did when asked last
        self._depth_ahead = 0  # of the drafts that were planned ahead last
        self._realised = Realised()
        # Tokens that a second is worth in the step planned last, and what verifying one costs of them. Both
        # are 0 while drafts are tried, which then are as deep as they are planned.
        self._worth = (0.0, 0.0)
        # What a batch needs is worked out once for drafting and selection.
        self._needed: tuple[DecodeBatch, float, Float64] = (DecodeBatch(), 0.0, np.zeros(0))
        # Seconds of a step besides what was predicted of it (prompts, above all), and what was predicted.
        self._unseen_s = self._predicted_s = self._drafting_s = 0.0

    def rests(self, num_requests: int, step: int) -> bool:
        """Whether it was lately found that drafting does not pay, for no more requests than these."""
        return self._rest.holds(num_requests, step)

    def look_ahead(self, batch: Sequence[DecodeRequest], context: StepContext) -> None:
        """Rest on, unless drafts pay in this step, are needed in it, or are to be tried.

        As of `plan`, they do not pay where they make requests late.
        """
        if not batch:
            return
        batch = DecodeBatch.of(batch)
        if self._try_plain.is_running(context.step) and not self._is_urgent(batch, context):
            self._rest.begin(len(batch), PROBE_RUN, context)
            return
        outlook = self._look(batch, 1, context)
        if outlook.drafted > outlook.plain and self._makes_late(batch, outlook):
            if not self._try_drafts.is_due(context.step):
                self._rest.begin(len(batch), with_objectives(context), context)
            return
        may_help = self._may_help(batch, outlook)
        if outlook.drafted > outlook.plain or (may_help and self._is_urgent(batch, context)):
            return
        if not (batch.num_drafting and self._try_drafts.is_due(context.step)):
            self._rest.after_look(batch, context)

    def plan(self, batch: Sequence[DecodeRequest], context: StepContext) -> list[DraftPlan]:
        """Whether to draft by predicted goodput; how deep the drafter finds out; width by AdaServe's rule."""
        if not batch:
            return []
        config, n, batch = self._config, len(batch), DecodeBatch.of(batch)
        self._realised.look(batch, context.step, context.prompts_s)
        self._worth = (0.0, 0.0)
        width = clip(config.draft_budget / n + config.width_offset, 1, config.max_width)
        outlook = self._look(batch, 1, context)
        best_depth, drafted, plain = outlook.depth, outlook.drafted, outlook.plain
        pays = drafted > plain or (self._paid and n > FEW_REQUESTS and self._goes_on(n, outlook))
        depth, goodput = (best_depth, drafted) if pays else (0, plain)
        self._paid = pays
        if depth and self._makes_late(batch, outlook) and not self._try_drafts.tries(context.step, 1.0):
            self._rest.begin(n, with_objectives(context), context)
            return [NO_DRAFT] * n
        need = self._needs(batch, context)
        is_urgent = self._is_urgent(batch, context)
        if depth == 0 and is_urgent:
            # Who is in need drafts although it does not pay, and beside that, drafts of the others pay
            # sooner: what drafting takes besides their own rows is spent. But all of them wait for it.
            is_urgent = self._may_help(batch, outlook)
            if is_urgent and best_depth:
                depth, goodput = best_depth, drafted
        if not is_urgent and depth and plain_at_best(plain, batch, context) * SURELY_PAYS > drafted:
            # As much time as a try of drafts has: plain steps are slower until drafters have come to rest.
            times = min(max(outlook.drafted_s / outlook.plain_s, 1.0), MOST_PLAIN)
            if self._try_plain.tries(context.step, plain / drafted, num_steps=round(times * PROBE_RUN)):
                self._rest.begin(n, PROBE_RUN, context)
                return [NO_DRAFT] * n
        elif depth == 0 and not is_urgent:
            times = max(1.0, outlook.drafted_s / outlook.plain_s)
            if batch.num_drafting and self._try_drafts.tries(context.step, drafted / plain, times):
                most = min(PROBE_DEPTH, config.max_depth)
                return [DraftPlan(depth=min(most, request.max_draft)) for request in batch]
            self._rest_after_look(batch, context)
            return [NO_DRAFT] * n
        self._rest.ended()
        self._realised.drafted(batch, context.step, outlook.by_rates)
        # What the planned tokens cost on average: on this side of the roofline's knee they are nearly free.
        added_s = added_by_drafts(batch, n * max(1, depth), context)
        least = goodput * min(float(np.add.reduce(added_s)) / len(added_s), float(added_s[-1]))
        self._worth = (goodput, least)
        rate = sum([request.rate for request in batch]) / n
        if (1.0 - rate) * SECOND_CHOICE < least:
            width = 1  # too few second choices are right to pay for verifying them
        max_depth = config.max_depth
        if context.is_ahead and best_depth:
            # As deep as planned is computed for all who draft together, and all of that is verified.
            max_depth = self._depth_ahead = outlook.steady_depth(self._depth_ahead)
            # Else the selection does.
            self._follow(outlook.drafted_s, context, outlook.draft_s)
        return DraftShapes(max_depth, width, goodput, least).plans(batch, need, is_urgent, context)

    def stop_rule(
        self, drafter: str, num_drafting: int, batch: Sequence[DecodeRequest], context: StepContext
    ) -> ForwardRule | None:
        """With many requests, a layer must bring all of them together more than its forward is worth.

        None for few, each of which has a bound of its own, and for drafters whose layers cost nothing.
        """
        if len(batch) <= FEW_REQUESTS:
            return None
        load = DecodeBatch.of(batch).load
        count, tokens = load.get(drafter, (0, 0))
        if not count:
            return None
        one_s = context.cost.draft_layer_seconds(drafter, 1, 1, tokens // count)
        all_s = context.cost.draft_layer_seconds(drafter, count, 1, tokens)
        if one_s <= 0.0:
            return None
        row_s = (all_s - one_s) / (count - 1) if count > 1 else 0.0
        goodput, verify_tokens = self._worth
        return ForwardRule(
            rate=sum([request.rate for request in batch if request.drafter == drafter]) / count,
            verify_tokens=verify_tokens,
            row_tokens=goodput * row_s,
            forward_tokens=goodput * (one_s - row_s),
            exponent=context.calibration.of(drafter).exponent,
        )

    def select(
        self, batch: Sequence[DecodeRequest], trees: Sequence[TokenTree], context: StepContext
    ) -> list[Int32]:
        """The SLO phase within the knee of the roofline, then nodes while they pay."""
        if not batch:
            return []
        batch, trees = DecodeBatch.of(batch), TreeBatch.of(trees)
        if trees.num_nodes <= FEW_NODES and not is_tracing():
            return self._select_of_few(batch, trees, context)
        forest = Forest.of(trees)
        drafters = [request.drafter for request in batch]
        probability = context.calibration.path_probabilities(forest, drafters)
        cost, n = context.cost, len(batch)
        budget = self._config.verify_budget or cost.knee(n)
        required = self._needs(batch, context)
        # Unlike AdaServe by what trees can yield: `needs` has left out who is late beyond help.
        capped = np.minimum(required, forest.depths + 1.0)
        chosen = slo_customized(forest, probability, capped, self._config.max_nodes, budget)
        num_chosen = int(np.count_nonzero(chosen))
        whole_s, base_s = drafted_step_s(batch, num_chosen, context)
        added = added_by_drafts(batch, forest.num_nodes - num_chosen, context, taken=num_chosen - n)
        chosen = marginal_goodput(chosen, probability, base_s, added)
        num_added = int(np.count_nonzero(chosen)) - num_chosen
        self._follow(whole_s + float(np.add.reduce(added[:num_added])), context, context.draft_s)
        return forest.chosen_nodes(chosen)

    def _select_of_few(self, batch: DecodeBatch, trees: TreeBatch, context: StepContext) -> list[Int32]:
        """The same in plain numbers."""
        cost, n = context.cost, len(batch)
        f = context.calibration.path_probabilities_of_few(trees, [request.drafter for request in batch])
        offsets = [0, *accumulate([len(tree.token) for tree in trees])]
        chosen, required = offsets[:-1], self._needs(batch, context).tolist()
        if max(required) > 1.0:
            depths = [max(tree.depth.tolist()) for tree in trees]
            capped = [min(tokens, depth + 1.0) for tokens, depth in zip(required, depths, strict=True)]
            budget = self._config.verify_budget or cost.knee(n)
            chosen += urgent(offsets, f, capped, self._config.max_nodes, budget - n)
        whole_s, base_s = drafted_step_s(batch, len(chosen), context)
        taken = set(chosen)
        rest = [node for node in range(len(f)) if node not in taken]
        added = added_by_drafts(batch, len(rest), context, taken=len(chosen) - n).tolist()
        more = paying(rest, f, sum([f[node] for node in chosen]), base_s, added)
        self._follow(whole_s + sum(added[: len(more)]), context, context.draft_s)
        return by_tree(offsets, chosen + more)

    def _rest_after_look(self, batch: DecodeBatch, context: StepContext) -> None:
        # Those that no drafter has read yet are read meanwhile: then few look at once.
        if batch.num_drafting or len(batch) > FEW_REQUESTS:
            self._rest.after_look(batch, context)

    def _goes_on(self, num_requests: int, outlook: Outlook) -> bool:
        """Whether so many that are drafted for go on, though drafts would not pay if they were not."""
        fallen_short = min(1.0, self._realised.known(num_requests))
        return fallen_short * outlook.drafted > STILL_PAYS * outlook.plain

    def _is_urgent(self, batch: DecodeBatch, context: StepContext) -> bool:
        """Whether one token a step will not do for somebody's objective."""
        return batch.has_objectives and bool(np.count_nonzero(self._needs(batch, context) > 1.0))

    def _needs(self, batch: DecodeBatch, context: StepContext) -> Float64:
        """What each request is to get from this step, by `triage.needs`."""
        before, step_s, found = self._needed
        if step_s == context.step_s and (before is batch or before == batch):
            return found
        beside_s = context.draft_overhead_s + self._drafting_s + self._unseen_s
        found = needs(batch, context, self._z, self._config.max_depth, beside_s)
        self._needed = (batch, context.step_s, found)
        return found

    def _follow(self, predicted_s: float, context: StepContext, draft_s: float) -> None:
        """Compare steps with what was predicted of them; both are means over the recent ones."""
        if self._predicted_s == 0.0:
            self._predicted_s, self._drafting_s = predicted_s, draft_s
        unseen_s = max(0.0, context.step_s - self._predicted_s)
        self._unseen_s += SMOOTHING * (unseen_s - self._unseen_s)
        self._predicted_s += SMOOTHING * (predicted_s - self._predicted_s)
        self._drafting_s += SMOOTHING * (draft_s - self._drafting_s)

    def _may_help(self, batch: DecodeBatch, outlook: Outlook) -> bool:
        """Whether drafts that do not pay may be made for those in need.

        They may where they cost next to nothing, and more where they keep more requests on time than plain
        steps, which are late for all with a tight objective alike.
        """
        if not outlook.depth or outlook.drafted >= (1.0 - MOST_LOST) * outlook.plain:
            return True
        if outlook.drafted < (1.0 - MOST_LOST_IN_TIME) * outlook.plain:
            return False
        return self._num_kept_on_time(batch, outlook) > 0

    def _num_kept_on_time(self, batch: DecodeBatch, outlook: Outlook) -> int:
        """How many more requests drafted steps keep on time than plain ones; negative if fewer."""
        drafted_s, plain_s = outlook.drafted_s + self._unseen_s, outlook.plain_s + self._unseen_s
        return num_on_time(batch, drafted_s, outlook.depth) - num_on_time(batch, plain_s, 0)

    def _makes_late(self, batch: DecodeBatch, outlook: Outlook) -> bool:
        """Whether drafts, though they raise goodput, keep fewer requests on time than plain steps do."""
        if not batch.has_objectives or (1.0 - MOST_FORGONE) * outlook.drafted > outlook.plain:
            return False
        return self._num_kept_on_time(batch, outlook) < 0

    def _look(self, batch: DecodeBatch, width: int, context: StepContext) -> Outlook:
        """Depth of drafts with the highest predicted goodput (SmartSpec's objective), and what it brings.

        Args:
            batch: the requests.
            width: beam width.
            context: costs above all.
        """
        n, deepest, cost = len(batch), self._config.max_depth, context.cost
        num_context, load = batch.num_context, batch.load
        layer_s = {name: cost.draft_layer_seconds(name, 1, width) for name in load}
        expected, drafted = tokens_by_depth(batch, deepest, cheap(layer_s, context))
        plain_s = cost.verify_seconds(n, n, num_context) + context.plain_overhead_s
        plain = n / (plain_s - spent_on_prompts(n, context, drafted=False))
        best_depth, best, best_s, best_draft_s, by_rates = 0, 0.0, 0.0, 0.0, 0.0
        by_depth = [0.0]
        drafts_s = [
            cost.draft_seconds_by_depth(name, count, width, deepest, tokens)
            for name, (count, tokens) in load.items()
        ]
        # Drafters work at the same time.
        slowest_s = drafts_s[0] if len(drafts_s) == 1 else [max(each) for each in zip(*drafts_s, strict=True)]
        spent_s = spent_on_prompts(n, context, drafted=True)
        roots_s = cost.verify_seconds(n, n, num_context, drafted=True)
        until_s = [0.0, *added_by_drafts(batch, round(drafted[-1]), context).cumsum().tolist()]
        for depth in range(1, deepest + 1):
            if drafted[depth] == drafted[depth - 1]:
                break
            verify_s = roots_s + until_s[round(drafted[depth])]
            step_s = slowest_s[depth] + verify_s + context.draft_overhead_s
            goodput = expected[depth] / (step_s - spent_s)
            by_depth.append(goodput)
            if goodput > best:
                best_depth, best, best_s, by_rates = depth, goodput, step_s, expected[depth] / step_s
                best_draft_s = slowest_s[depth]
        goodput = best * self._realised.gain(n)
        return Outlook(best_depth, goodput, best_s, best_draft_s, plain, plain_s, by_rates, by_depth)
