"""Drafters, requests and costs as a selector sees them (`selector.protocol`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.cost_model import CostModel
from cluster.drafter_state import DrafterState
from cluster.requests import Request
from selector.protocol import DrafterView, PoolView, RequestView
from selector.sharing import Sharing

# Weight of the newest reading in the running mean of seconds per token; of shorter ones the time is mostly
# that of the call itself.
SMOOTHING = 0.2
LEAST_TOKENS = 16
# A reading counts as at most so many times what is expected of it: a hiccup of the machine is not believed.
MOST_TIMES = 4.0
# A layer is taken to cost a share of a draft of so many.
LAYERS = 4
# Share of a step's overhead that a draft call more takes: building it, sending it, taking its answer in.
CALL_SHARE = 0.25


@dataclass(slots=True)
class MeasuredCosts:
    """`StepCosts` and `BatchCosts` by the cell's cost model; rebuilding a cache is measured as it happens.

    Attributes:
        cost: the model.
        keeping: kinds that keep keys and values.
        sharing: which kinds compute on the same processors.
    """

    cost: CostModel
    keeping: set[str] = field(default_factory=set)
    sharing: Sharing = field(default_factory=Sharing)
    _token_s: dict[str, float] = field(default_factory=dict)

    def verify_s(self, num_context: int) -> float:
        """See `StepCosts`."""
        return self.cost.verify_seconds(1, 1, num_context)

    def token_s(self, num_context: int) -> float:
        """See `StepCosts`."""
        # Those of a draft: by itself a request hardly ever reaches the knee of the roofline.
        return float(self.cost.verify_added_seconds(1, LAYERS, num_context).sum()) / LAYERS

    def layer_s(self, kind: str, num_context: int) -> float:
        """See `StepCosts`."""
        return self.cost.draft_seconds(kind, 1, 1, LAYERS, num_context) / LAYERS

    def step_s(self, num_requests: int, depth: int, num_context: int) -> float:
        """See `BatchCosts`."""
        overhead_s = self.cost.profile.overhead_s
        if depth == 0:
            return self.cost.verify_seconds(num_requests, num_requests, num_context) + overhead_s / 2
        num_rows = num_requests * (1 + depth)
        return self.cost.verify_seconds(num_requests, num_rows, num_context, drafted=True) + overhead_s

    def draft_s(self, kind: str, num_requests: int, depth: int, num_context: int) -> float:
        """See `BatchCosts`."""
        seconds = self.cost.draft_seconds(kind, num_requests, 1, depth, num_context)
        return seconds + CALL_SHARE * self.cost.profile.overhead_s

    def rebuild_s(self, kind: str, num_tokens: int) -> float:
        """See `StepCosts`; before anything was read, what forwards of few rows let expect."""
        if kind not in self.keeping:
            return 0.0
        token_s = self._token_s.get(kind)
        return self.cost.read_seconds(kind, num_tokens) if token_s is None else token_s * num_tokens

    def have_read(self, kind: str, num_tokens: int, seconds: float) -> None:
        """A drafter of this kind read so many tokens of one request in one call."""
        if num_tokens < LEAST_TOKENS or kind not in self.keeping:
            return
        token_s = seconds / num_tokens
        expected_s = self.rebuild_s(kind, num_tokens) / num_tokens
        if expected_s > 0.0:  # else the profile says nothing of it
            token_s = min(token_s, MOST_TIMES * expected_s)
        before = self._token_s.get(kind, token_s)
        self._token_s[kind] = before + SMOOTHING * (token_s - before)

    def forget(self, kind: str) -> None:
        """How long drafters of this kind read says nothing of those that come."""
        self._token_s.pop(kind, None)


def drafter_view(drafter: DrafterState) -> DrafterView:
    """The instance as it stands."""
    return DrafterView(
        name=drafter.name,
        kind=drafter.kind,
        capacity=drafter.max_requests,
        load=len(drafter.served),
        size=drafter.size,
    )


def pool_view(drafters: Iterable[DrafterState], costs: MeasuredCosts, max_depth: int) -> PoolView:
    """These drafters."""
    views = {drafter.name: drafter_view(drafter) for drafter in drafters}
    return PoolView(drafters=views, costs=costs, max_depth=max_depth)


def request_view(request: Request, allowed: tuple[str, ...]) -> RequestView:
    """The request as it stands; `allowed` are the instances it may use."""
    num_prompt, num_output = request.num_prompt, len(request.output)
    # By position, which takes half as long: one is made per request and step.
    return RequestView(
        request.request_id,
        request.drafter,
        allowed,
        num_prompt,
        num_prompt + num_output,
        request.submit.sampling.max_tokens - num_output,
        request.num_steps,
    )
