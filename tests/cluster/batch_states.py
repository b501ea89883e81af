"""Random states of a cell for the batching rules: waiting and running requests, and what rules may read."""

from __future__ import annotations

from itertools import product
from typing import Any

from hypothesis import strategies as st

from cluster.batching.base import BatchContext
from cluster.cost_model import CostModel, CostProfile
from cluster.linear_cost import LinearCost
from cluster.requests import Request, State
from cluster.stream_messages import Objective, Submit, Tenant
from engine.sampling_params import SamplingParams

NOW = 10.0
RUNNING = (State.PREFILLING, State.READY, State.DRAFTING, State.DRAFTED)
TPOTS_MS = (None, None, 4.0, 12.0, 30.0, 150.0)
TTFTS_MS = (None, None, 50.0, 1000.0)
# What is drawn at once: it is by the number of draws that Hypothesis is slow.
LIMITS = list(
    product(
        (0.0, 1e-4, 5e-4),
        (0.0, 3e-4),
        (8, 64, 300),
        (0.5, 30.0),
        (0.0, 3e-3),
        (0.0, 4e-3),
        (1.0, 4.3),
        (1.0, 2.1),
        (0.0, 3.0),
    )
)
TERMS = list(product((0, 0, 30), TPOTS_MS, TTFTS_MS, (0, 0, 0, 1), "ab"))


def cost(token_s: float = 5e-4, each_s: float = 2e-4, fixed_s: float = 5e-3) -> CostModel:
    """A target without a knee."""
    return CostModel(
        CostProfile(target=LinearCost(alpha=1e-7, gamma=token_s, rho=each_s, delta=fixed_s), overhead_s=5e-4)
    )


def roofline(num_free: int, fixed_s: float = 5e-3) -> CostModel:
    """A target whose rows are nearly free up to so many: prompts read in pieces take less of its time."""
    target = LinearCost(
        alpha=1e-7, gamma=5e-6, rho=2e-4, delta=fixed_s, gamma_knee=5e-4, knee_tokens=num_free
    )
    return CostModel(CostProfile(target=target, overhead_s=5e-4))


def context(**changes: Any) -> BatchContext:
    fields: dict[str, Any] = {
        "now": NOW,
        "cost": cost(),
        "max_running": 12,
        "chunk_tokens": 64,
        "whole_tokens": 200,
        "ageing_s": 30.0,
        "free_slots": 1000,
        "step_s": 0.02,
        "beside_s": 1e-3,
        "num_rows": 2.0,
        "num_committed": 1.5,
    }
    fields |= changes
    return BatchContext(prompt_token_s=fields["cost"].prompt_token_seconds(), **fields)


@st.composite
def contexts(draw: st.DrawFn) -> BatchContext:
    token_s, each_s, *limits = draw(st.sampled_from(LIMITS))
    names = ("chunk_tokens", "ageing_s", "beside_s", "draft_left_s", "num_rows", "num_committed")
    return context(
        cost=cost(token_s, each_s),
        max_running=draw(st.integers(1, 12)),
        free_slots=draw(st.integers(0, 1000)),
        **dict(zip((*names, "num_prefilled"), limits, strict=True)),
    )


def request(
    order: int,
    state: State = State.WAITING,
    *,
    prompt: int = 20,
    output: int = 5,
    decoding_s: float = 0.05,
    arrived: float = NOW - 0.1,
    computed: int = 0,
    tpot_ms: float | None = None,
    ttft_ms: float | None = None,
    priority: int = 0,
    tier: str = "default",
    tenant: str = "",
    served_at: float | None = None,
) -> Request:
    """A request in some state; those past their prefill have output, the others a part of their prompt."""
    made = Request(
        Submit(
            request_id=f"r{order}",
            prompt=[1] * prompt,
            sampling=SamplingParams(max_tokens=200),
            objective=Objective(tpot_ms=tpot_ms, ttft_ms=ttft_ms),
            priority=priority,
            tier=tier,
            tenant=Tenant(label=tenant),
        ),
        "client",
        arrived,
        order,
        state=state,
        last_served_at=served_at,
    )
    if state in (State.READY, State.DRAFTING, State.DRAFTED, State.VERIFYING):
        made.extend([1] * output)
        made.num_computed = made.num_tokens - 1
        made.first_token_at = NOW - decoding_s
        made.num_steps = output
    elif state is not State.WAITING:
        made.num_computed = min(computed, prompt - 1)
    return made


@st.composite
def requests_in(draw: st.DrawFn, order: int, state: State) -> Request:
    computed, tpot_ms, ttft_ms, priority, tier = draw(st.sampled_from(TERMS))
    return request(
        order,
        state,
        prompt=draw(st.integers(1, 150)),
        output=draw(st.integers(1, 60)),
        decoding_s=draw(st.floats(0.0, 1.0)),
        arrived=NOW - draw(st.floats(0.0, 2.0)),
        computed=computed,
        tpot_ms=tpot_ms,
        ttft_ms=ttft_ms,
        priority=priority,
        tier=tier,
        served_at=None if state is State.WAITING else NOW - draw(st.floats(0.0, 0.3)),
    )


@st.composite
def cells(
    draw: st.DrawFn, states: tuple[State, ...] = RUNNING
) -> tuple[list[Request], list[Request], BatchContext]:
    """Waiting requests by (priority, arrival), running requests, and the context."""
    limits = draw(contexts())
    order = iter(range(1000))
    kinds = draw(st.lists(st.sampled_from(states), max_size=min(6, limits.max_running)))
    running = [draw(requests_in(next(order), state)) for state in kinds]
    waiting = [draw(requests_in(next(order), State.WAITING)) for _ in range(draw(st.integers(0, 4)))]
    waiting.sort(key=lambda r: (r.submit.priority, r.order))
    return waiting, running, limits


def of_state(running: list[Request], state: State) -> list[Request]:
    return [member for member in running if member.state is state]


def ids(requests: list[Request]) -> list[str]:
    return [member.request_id for member in requests]
