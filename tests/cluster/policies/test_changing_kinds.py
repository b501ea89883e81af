"""On a machine where a step after others of another kind is slow, the default finds which kind pays."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from cluster.call_parts import NO_ROWS, Rows
from cluster.config import PolicyConfig
from cluster.cost_model import CostModel, CostProfile
from cluster.linear_cost import LinearCost
from cluster.policies.flotilla import Flotilla
from cluster.policies.probing import Probing
from cluster.step_overhead import StepOverhead
from tests.cluster.policies.batches import context, request

# Seconds beside drafting and forwards, and what a step after two of the other kind takes besides; its forward
# takes so many times as long.
PLAIN_S, DRAFTED_S, CHANGE_S, CHANGE_TIMES = 7e-4, 2e-3, 5e-3, 1.5
# In one step of so many the drafter has not read enough, and nobody can be drafted for.
UNREAD = 20


@dataclass
class Machine:
    """One request without end, and the scheduler's beliefs about the machine that decodes it."""

    cost: CostModel = field(
        default_factory=lambda: CostModel(
            CostProfile(target=LinearCost(gamma=3e-4, delta=4e-3), drafters={"small": LinearCost(delta=5e-4)})
        )
    )
    overhead: StepOverhead = field(default_factory=lambda: StepOverhead(1e-3))
    policy: Flotilla = field(default_factory=lambda: Flotilla(PolicyConfig(max_depth=4, max_width=1)))
    drafted: list[bool] = field(default_factory=list)
    # So many plain steps after drafts take longer: drafters still work.
    settling: int = 0

    def step(self, rate: float, times: float = 1.0) -> None:
        """Decode one step of a request of which this share of drafted tokens is accepted.

        All of it takes so many times as long as usual.
        """
        step = len(self.drafted)
        max_draft = 0 if step % UNREAD == 0 else 4
        now = replace(
            context(),
            cost=self.cost,
            step=step,
            plain_overhead_s=self.overhead.plain_s(1),
            draft_overhead_s=self.overhead.drafted_s(1),
        )
        depth = 0
        if not self.policy.rests(1, step):
            (plan,) = self.policy.plan([request(max_draft=max_draft, rate=rate if max_draft else 0.0)], now)
            depth = plan.depth
        is_drafted = depth > 0
        has_changed = is_drafted not in self.drafted[-2:]
        if is_drafted:
            layers_s = self.cost.layers_seconds("small", 1, 1, depth)
            self.cost.observe_draft("small", layers_s, times * layers_s * (2.0 if has_changed else 1.0))
        parts = self.cost.call_parts(Rows(1, 1 + depth, 50, 50), NO_ROWS, drafted=is_drafted)
        is_settling = not is_drafted and any(self.drafted[-self.settling :] if self.settling else ())
        slowed = CHANGE_TIMES if has_changed or is_settling else 1.0
        self.cost.observe_call(parts, times * parts.profile_s * slowed)
        beside_s = (DRAFTED_S if is_drafted else PLAIN_S) + (CHANGE_S if has_changed else 0.0)
        self.overhead.observe(1, times * beside_s, drafted=is_drafted)
        self.drafted.append(is_drafted)

    def run(self, rate: float, num_steps: int) -> float:
        """The share of the last steps, half of them, that drafted."""
        for _ in range(num_steps):
            self.step(rate)
        last = self.drafted[-num_steps // 2 :]
        return sum(last) / len(last)


def goodput(rate: float, depth: int) -> float:
    """Tokens per second that steps of one kind after the other truly have."""
    tokens = sum(rate**layer for layer in range(depth + 1))
    beside_s = DRAFTED_S + depth * 5e-4 if depth else PLAIN_S
    return tokens / (4e-3 + (1 + depth) * 3e-4 + beside_s)


@pytest.mark.parametrize(("rate", "before", "pays"), [(0.6, 0.05, True), (0.15, 0.8, False)])
def test_whether_drafting_pays_is_found_whatever_was_believed_before(
    rate: float, before: float, pays: bool
) -> None:
    """What paid before is done in nearly all steps, so the other kind is rare, and seems slow."""
    best = max(goodput(rate, depth) for depth in range(1, 5))
    assert (best > 1.2 * goodput(rate, 0)) if pays else (best < 0.95 * goodput(rate, 0))
    machine = Machine()
    share = machine.run(before, 600)
    assert share < 0.2 if pays else share > 0.8
    share = machine.run(rate, 2400)
    assert share > 0.8 if pays else share < 0.2


@pytest.mark.parametrize(("rate", "pays"), [(0.32, False), (0.6, True)])
def test_what_plain_steps_take_is_found_where_drafters_come_to_rest_slowly(rate: float, pays: bool) -> None:
    """A short run of them is slow to its end. Drafts that paid before seem to pay on, though they lose."""
    best = max(goodput(rate, depth) for depth in range(1, 5))
    unsettled = 1.0 / (CHANGE_TIMES * 4.3e-3 + PLAIN_S)
    assert best > 1.2 * goodput(rate, 0) if pays else 1.1 * unsettled < best < 0.97 * goodput(rate, 0)
    machine = Machine(settling=3)
    assert machine.run(0.8, 600) > 0.8
    machine.run(rate, 2400)
    assert machine.run(rate, 600) > 0.8 if pays else machine.run(rate, 600) < 0.2


def test_drafters_that_were_slow_for_a_moment_are_soon_drafted_with_again() -> None:
    """As while something is compiled: what nobody asks for is learnt in tries, of which each must count."""
    machine = Machine()
    machine.run(0.6, 300)
    for _ in range(20):
        layers_s = machine.cost.layers_seconds("small", 1, 1, 4)
        machine.cost.observe_draft("small", layers_s, 100.0 * layers_s)
    assert machine.run(0.6, 400) < 0.1
    machine.run(0.6, 1600)
    assert machine.run(0.6, 200) > 0.8


@pytest.mark.parametrize("times", [4.0, 20.0])
def test_plain_steps_are_tried_again_however_slow_they_were(times: float) -> None:
    """The machine was slow while they were the rule; drafts, which came after that, seemed sure to pay."""
    assert max(goodput(0.15, depth) for depth in range(1, 5)) < 0.85 * goodput(0.15, 0)
    machine = Machine()
    machine.run(0.15, 600)
    for _ in range(40):
        machine.step(0.15, times)
    machine.policy._try_drafts = Probing()  # now of all times drafts are tried
    assert machine.run(0.15, 200) > 0.8
    machine.run(0.15, 3000)
    assert machine.run(0.15, 200) < 0.2
