"""What a policy was asked and answered, gathered step by step: a bounded ring, and lines for a file."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from cluster.calibration import Calibration
from cluster.call_parts import CallParts
from cluster.decisions import (
    CalibrationTable,
    CallContext,
    DraftCallRecord,
    ForwardSeconds,
    Header,
    PolicyCall,
    RequestDecision,
    Seconds,
    StepRecord,
    StopRuleCall,
    encode_entry,
)
from cluster.forest import Forest
from cluster.open_step import OpenStep
from cluster.phase_trace import SelectionTrace, chosen_by_phase
from cluster.planned_ahead import Grown
from cluster.policies.base import DecodeRequest, Int32, StepContext
from cluster.recorded_context import calibration_state, context_values
from drafters.messages import DraftPlan, DraftResult
from engine.stop_rules import StopRule
from engine.tree import TokenTree
from engine.tree_batch import TreeBatch
from verifier.messages import VerifyCall, VerifyResult

# A step whose requests all went away is never verified; after so many calls of the policy it is closed.
STALE_CALLS = 64
# Forwards of prompts alone that are noted between two steps.
PROMPTS_KEPT = 64
# Calibration tables this many versions old are referred to by no step that is still on its way.
TABLE_VERSIONS = 512

# In place of a phase of selection: all that was drafted as a step planned ahead said.
PLANNED = "planned"

Closed = tuple[StepRecord, dict[tuple[str, int], CalibrationTable]]


class DecisionLog:
    """The newest steps of one scheduler. It does no input or output: `take_lines` is for who does.

    Args:
        header: what is recorded here.
        size: steps kept; older ones are forgotten.
        has_sink: whether `take_lines` will be called for every step.
    """

    def __init__(self, header: Header, size: int, *, has_sink: bool = False) -> None:
        self.now = 0.0
        self._header = header
        self._ring: deque[Closed] = deque(maxlen=size)
        self._unwritten: deque[Closed] = deque(maxlen=None if has_sink else 0)
        self._written: set[tuple[str, int]] = set()
        self._open: list[OpenStep] = []
        self._step_of: dict[str, OpenStep] = {}
        self._tables: dict[str, CalibrationTable] = {}
        self._next_order = 0
        self._prompt_call: tuple[int, ForwardSeconds] | None = None
        self._prompts: deque[ForwardSeconds] = deque(maxlen=PROMPTS_KEPT)

    def __len__(self) -> int:
        """Steps kept."""
        return len(self._ring)

    # What the policy was asked

    def planned(
        self, batch: Sequence[DecodeRequest], context: StepContext, plans: Sequence[DraftPlan]
    ) -> None:
        """`Policy.plan` answered: a step begins."""
        step = self._begin(context)
        for request, plan in zip(batch, plans, strict=True):
            self._decision(step, request, context).plan = plan
        step.record.plans.append(self._call(step, batch, context))

    def ruled(
        self,
        drafter: str,
        num_drafting: int,
        batch: Sequence[DecodeRequest],
        context: StepContext,
        rule: StopRule | None,
    ) -> None:
        """`StopsDrafting.stop_rule` answered, for the step planned last."""
        step = self._step_of.get(batch[0].request_id) or self._begin(context)
        for request in batch:
            self._decision(step, request, context)
        call = self._call(step, batch, context)
        step.record.stop_rules.append(
            StopRuleCall(
                order=call.order,
                requests=call.requests,
                context=call.context,
                drafter=drafter,
                num_drafting=num_drafting,
                rule=rule,
            )
        )

    def selected(
        self,
        batch: Sequence[DecodeRequest],
        trees: Sequence[TokenTree],
        context: StepContext,
        selected: Sequence[Int32],
        trace: SelectionTrace,
    ) -> None:
        """`Policy.select` answered; `trace` has its phases."""
        step = self._joined(request.request_id for request in batch) or self._begin(context)
        forest = Forest.of(trees)
        acceptance = context.calibration.path_probabilities(forest, [r.drafter for r in batch])
        phases = chosen_by_phase(forest, selected, trace)
        for place, (request, tree) in enumerate(zip(batch, trees, strict=True)):
            decision = self._decision(step, request, context)
            decision.tree = tree
            start, end = forest.offsets[place], forest.offsets[place + 1]
            # For people only, so four decimals will do.
            decision.acceptance = np.round(acceptance[start:end], 4).tolist()
            decision.chosen = phases[place]
            if trace.required is not None and len(trace.required) == len(batch):
                decision.required_capped = float(trace.required[place])
        step.record.select = self._call(step, batch, context, budget=trace.budget)

    def grown(
        self, trees: Mapping[str, TokenTree], calibration: Calibration, drafts: Sequence[Grown]
    ) -> None:
        """A step that was planned ahead begins: trees by request id, all verified, and what they took."""
        step = self._joined(trees)
        if step is None:
            return
        step.record.time_s = self.now
        for one in drafts:
            seconds = Seconds(predicted=one.predicted_s, actual=one.seconds)
            record = DraftCallRecord(drafter=one.drafter, num_requests=one.num_requests, seconds=seconds)
            step.record.drafts.append(record)
        for request_id, tree in trees.items():
            place = step.index.get(request_id)
            if place is None:
                continue
            decision = step.record.requests[place]
            drafted, names = TreeBatch([tree]), [decision.request.drafter]
            acceptance = calibration.path_probabilities_of_few(drafted, names)
            decision.tree, decision.acceptance = tree, [round(chance, 4) for chance in acceptance]
            decision.chosen = {PLANNED: list(range(1, len(tree)))} if len(tree) > 1 else {}

    def _begin(self, context: StepContext) -> OpenStep:
        for step in [one for one in self._open if self._next_order - one.last_order > STALE_CALLS]:
            self._close(step)
        step = OpenStep(StepRecord(step=context.step, time_s=self.now, requests=[]), self._next_order)
        self._open.append(step)
        return step

    def _joined(self, request_ids: Iterable[str]) -> OpenStep | None:
        """The step of these requests that is not selected for yet; made one if they were planned apart."""
        steps = [self._step_of[one] for one in request_ids if one in self._step_of]
        apart = list(dict.fromkeys(step for step in steps if step.record.select is None))
        for other in apart[1:]:
            apart[0].join(other)
            self._open.remove(other)
            for request_id in other.index:
                if self._step_of.get(request_id) is other:
                    self._step_of[request_id] = apart[0]
        return apart[0] if apart else None

    def _decision(self, step: OpenStep, request: DecodeRequest, context: StepContext) -> RequestDecision:
        """The entry of the request as it was seen, made if there is none."""
        place = step.index.get(request.request_id)
        if place is not None and step.record.requests[place].request == request:
            return step.record.requests[place]
        decision = RequestDecision(request=request, required=request.required(context.step_s))
        step.index[request.request_id] = len(step.record.requests)
        step.record.requests.append(decision)
        before = self._step_of.get(request.request_id)
        self._step_of[request.request_id] = step
        if before is None or before is step or before in self._step_of.values():
            return decision
        if before.verify_call < 0:  # else it was planned ahead, while that one is at the target
            self._close(before)
        return decision

    def _call(
        self,
        step: OpenStep,
        batch: Sequence[DecodeRequest],
        context: StepContext,
        budget: int | None = None,
    ) -> PolicyCall:
        call = PolicyCall(
            order=self._next_order,
            requests=[step.index[request.request_id] for request in batch],
            context=self._context(step, {request.drafter for request in batch}, context),
            budget=budget,
        )
        step.last_order = self._next_order
        self._next_order += 1
        return call

    def _context(self, step: OpenStep, drafters: set[str], context: StepContext) -> CallContext:
        versions = {}
        kinds = {one: context.cost.kinds[one] for one in sorted(drafters) if one in context.cost.kinds}
        for drafter in sorted({kinds.get(one, one) for one in drafters} - {""}):
            table = self._table(drafter, context.calibration)
            step.tables[drafter, table.version] = table
            versions[drafter] = table.version
        return CallContext(
            values=context_values(context),
            corrections=context.cost.corrections,
            calibration=versions,
            kinds=kinds,
            plain_by_size=context.cost.plain_by_size,
        )

    def _table(self, drafter: str, calibration: Calibration) -> CalibrationTable:
        """The drafter's calibration as it stands; a new version only if it changed."""
        learnt = calibration_state(calibration, drafter)
        known = self._tables.get(drafter)
        if known is None or any(
            not np.array_equal(value, learnt[name]) for name, value in known.state.items()
        ):
            state = {name: np.array(value) for name, value in learnt.items()}
            version = 0 if known is None else known.version + 1
            known = self._tables[drafter] = CalibrationTable(drafter=drafter, version=version, state=state)
        return known

    # What became of it

    def draft_sent(self, drafter: str, call_id: int, request_ids: Sequence[str], predicted_s: float) -> None:
        """A draft call is on its way."""
        step = self._step_of.get(request_ids[0])
        if step is not None:
            sent = DraftCallRecord(
                drafter=drafter, num_requests=len(request_ids), seconds=Seconds(predicted=predicted_s)
            )
            step.record.drafts.append(sent)
            step.unanswered[drafter, call_id] = sent

    def draft_done(self, drafter: str, result: DraftResult) -> None:
        """A draft call was answered."""
        for step in self._open:
            sent = step.unanswered.pop((drafter, result.call_id), None)
            if sent is not None:
                sent.seconds.actual = result.seconds

    def unplanned(self, call: VerifyCall) -> list[str]:
        """Requests in a verify call of which the policy was not asked, as it rested."""
        return [item.request_id for item in call.verify if item.request_id not in self._step_of]

    def verify_sent(
        self,
        call: VerifyCall,
        parts: CallParts,
        rested: Sequence[DecodeRequest],
        context: StepContext,
        *,
        ahead: bool = False,
    ) -> None:
        """A verify call is on its way; one of prompts alone belongs to no step, the next one tells of it.

        `rested` are those `unplanned`: their step has no call of the policy, unless others share it. One sent
        `ahead` was on its way before, and begins now.
        """
        seconds = ForwardSeconds(
            predicted=parts.seconds, profile=parts.profile_s, profile_decoding=parts.profile_decoding_s
        )
        if not call.verify:
            self._prompt_call = call.call_id, seconds
            return
        selected = (self._step_of.get(item.request_id) for item in call.verify)
        step = next((one for one in selected if one is not None and one.record.select is not None), None)
        step = step or self._joined(item.request_id for item in call.verify)
        if step is None:
            step = self._begin(context)
            step.record.context = self._context(step, set(), context)
        for request in rested:
            self._decision(step, request, context)
        step.verify_call = call.call_id
        step.record.verify, step.record.ahead = seconds, ahead
        for item in call.verify:
            place = step.index.get(item.request_id)
            if place is not None:
                step.record.requests[place].verified = item.num_nodes - 1

    def verify_done(self, result: VerifyResult) -> None:
        """A verify call was answered: its step is over."""
        if self._prompt_call is not None and self._prompt_call[0] == result.call_id:
            self._prompt_call[1].actual = result.forward_seconds
            self._prompts.append(self._prompt_call[1])
            self._prompt_call = None
            return
        step = next((one for one in self._open if one.verify_call == result.call_id), None)
        if step is None:
            return
        record = step.record
        for verdict in result.verdicts:
            place = step.index.get(verdict.request_id)
            if place is None:
                continue
            decision = record.requests[place]
            decision.committed = len(verdict.tokens)
            # The verdict counts nodes of the tree that was verified: the first of those chosen.
            nodes = decision.nodes
            decision.accepted = [nodes[node] for node in verdict.nodes if node < len(nodes)]
        if record.verify is not None:
            record.verify.actual = result.forward_seconds
            record.whole = Seconds(predicted=step.predicted_s(), actual=self.now - record.time_s)
        record.prompts = list(self._prompts)
        self._prompts.clear()
        self._close(step)

    def target_lost(self) -> None:
        """What it was asked to verify is not answered any more: those steps are over."""
        self._prompt_call = None
        for step in [one for one in self._open if one.verify_call >= 0]:
            self._close(step)

    def _close(self, step: OpenStep) -> None:
        self._open.remove(step)
        for request_id in [one for one, its_step in self._step_of.items() if its_step is step]:
            del self._step_of[request_id]
        self._ring.append((step.record, step.tables))
        self._unwritten.append((step.record, step.tables))

    # Lines

    @property
    def has_unwritten(self) -> bool:
        """Whether `take_lines` has something to tell."""
        return bool(self._unwritten)

    def close_sink(self) -> None:
        """Nobody will call `take_lines` any more."""
        self._unwritten = deque(maxlen=0)

    def take_lines(self, *, with_header: bool) -> list[bytes]:
        """Lines for the steps that ended since the last call, ready to be appended to what was taken before.

        `with_header` begins a record: with its header, and referring to no table written before.
        """
        steps = list(self._unwritten)
        self._unwritten.clear()
        if with_header:
            self._written.clear()
        # Those still open come later in the same file, whatever calls they began with.
        coming = [order for step in self._open for order in step.record.orders]
        return self._lines(steps, self._written, with_header=with_header, coming=coming)

    def dump(self, limit: int) -> list[bytes]:
        """A record of the newest `limit` steps kept, complete in itself.

        May be called in another thread than the rest: steps that are kept do not change any more, and a list
        of them is made at once.
        """
        steps = list(self._ring)[-limit:] if limit > 0 else []
        return self._lines(steps, set(), with_header=True)

    def _lines(
        self,
        steps: Sequence[Closed],
        written: set[tuple[str, int]],
        *,
        with_header: bool,
        coming: Sequence[int] = (),
    ) -> list[bytes]:
        lines = []
        if with_header:
            orders = [*coming, *(order for record, _ in steps for order in record.orders)]
            first = min(orders, default=self._next_order)
            lines.append(encode_entry(replace(self._header, first_call=first)))
        for record, tables in steps:
            for key, table in tables.items():
                if key not in written:
                    written.add(key)
                    written.discard((table.drafter, table.version - TABLE_VERSIONS))
                    lines.append(encode_entry(table))
            lines.append(encode_entry(record))
        return lines
