"""Random batches, candidate trees and costs for the policies."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import strategies as st

from cluster.calibration import Calibration
from cluster.cost_model import CostModel, CostProfile
from cluster.linear_cost import LinearCost
from cluster.policies.base import DecodeRequest, StepContext
from engine.tree import TokenTree

# What is drawn at once: it is by the number of draws that Hypothesis is slow.
COSTS = list(product((0.0, 1e-4, 2e-3), (0.0, 1e-4, 5e-4, 5e-3), (1e-3, 1e-2)))
DRAFTING = list(product(range(11), ("small", "large"), range(1, 5), (0.0, 0.3, 0.7, 0.7, 1.0)))
TPOTS_S = (None, None, None, 1e-3, 0.02, 0.1)
LOGPS = tuple(float(np.log(chance)) for chance in (1.0, 0.9, 0.5, 0.25, 0.01))


def request(name: str = "r", **changes: object) -> DecodeRequest:
    fields: dict[str, object] = {
        "request_id": name,
        "drafter": "small",
        "num_decoded": 3,
        "decoding_s": 0.1,
        "tpot_s": None,
        "max_draft": 8,
        "max_width": 4,
        "num_context": 50,
        "rate": 0.7,
    }
    return DecodeRequest(**(fields | changes))  # type: ignore[arg-type]


def context(
    *,
    draft_s: float = 2e-3,
    token_s: float = 5e-4,
    verify_s: float = 1e-2,
    overhead_s: float = 5e-4,
    experts_s: float = 0.0,
) -> StepContext:
    drafter = LinearCost(gamma=1e-5, delta=draft_s)
    profile = CostProfile(
        target=LinearCost(
            alpha=1e-6, gamma=token_s, rho=1e-4, delta=verify_s, experts_s=experts_s, expert_share=0.25
        ),
        drafters={"small": drafter, "large": LinearCost(gamma=1e-5, delta=2 * draft_s)},
    )
    return StepContext(
        cost=CostModel(profile),
        calibration=Calibration(),
        step_s=0.02,
        draft_s=draft_s,
        plain_overhead_s=overhead_s,
        draft_overhead_s=2 * overhead_s,
        step=1,
    )


@st.composite
def contexts(draw: st.DrawFn) -> StepContext:
    draft_s, token_s, verify_s = draw(st.sampled_from(COSTS))
    experts_s = draw(st.sampled_from([0.0, 0.0, 3.0 * verify_s]))
    return context(draft_s=draft_s, token_s=token_s, verify_s=verify_s, experts_s=experts_s)


@st.composite
def requests(draw: st.DrawFn) -> DecodeRequest:
    max_draft, drafter, max_width, rate = draw(st.sampled_from(DRAFTING))
    return request(
        drafter=drafter if max_draft else "",
        num_decoded=draw(st.integers(0, 30)),
        decoding_s=draw(st.floats(0.0, 1.0)),
        tpot_s=draw(st.sampled_from(TPOTS_S)),
        max_draft=max_draft,
        max_width=max_width,
        rate=rate if max_draft else 0.0,
    )


@st.composite
def candidate_trees(draw: st.DrawFn, max_nodes: int = 8, *, chain: bool = False) -> TokenTree:
    """Coarse probabilities make ties likely; probability 1 makes parent and child equal."""
    n = draw(st.integers(0, max_nodes))
    parent, logp, depth = [-1], [0.0], [0]
    for node in range(1, n + 1):
        places = 1 if chain else node
        above, step = divmod(draw(st.integers(0, places * len(LOGPS) - 1)), len(LOGPS))
        above = node - 1 if chain else above
        parent.append(above)
        logp.append(logp[above] + LOGPS[step])
        depth.append(depth[above] + 1)
    return TokenTree.of(range(n + 1), parent, logp, depth)
