"""A forward after drafting is one also where none of the drafts is verified."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.cost_model import VERIFY_DRAFTED, VERIFY_PLAIN
from cluster.policies.base import DecodeRequest, Int32, StepContext
from cluster.policies.fixed import Fixed
from engine.sampling_params import SamplingParams
from engine.tree import TokenTree
from tests.cluster.simulated import submit
from tests.cluster.test_core import World


class Doubtful(Fixed):
    """Drafts, and verifies nothing of it, as SpecServe does where many requests run."""

    def select(
        self, batch: Sequence[DecodeRequest], trees: Sequence[TokenTree], context: StepContext
    ) -> list[Int32]:
        self.num_pruned = getattr(self, "num_pruned", 0) + (max(map(len, trees)) > 1)
        return [np.zeros(1, dtype=np.int32) for _ in trees]


def test_pruned_drafts_do_not_count_as_plain_decoding() -> None:
    """What plain steps take is learnt where no drafter works: docs/profiling.md."""
    world = World(1, "fixed")
    policy = Doubtful(world.config.policy)
    world.core.planner.policy = policy
    world.send(submit(0, world.rng, sampling=SamplingParams(temperature=0.0, max_tokens=60)))
    world.drain()
    accounts = {name: account.calls for name, account in world.core.cost.accounts.items()}
    assert policy.num_pruned > 20
    assert accounts.get(VERIFY_DRAFTED, 0) == policy.num_pruned
    # Its prompt, the step in which the drafter reads it, and the last token, for which nothing is drafted.
    assert accounts[VERIFY_PLAIN] < 8
