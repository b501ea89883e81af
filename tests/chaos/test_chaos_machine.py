"""The fault search by Hypothesis: it chooses the operations by itself, and shortens what fails."""

from __future__ import annotations

import logging
import random

from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from benchmarks.chaos_schedule import CHOICES, COMMON, FAULTS, Settings
from benchmarks.chaos_world import ChaosWorld
from cluster.core import SchedulerCore
from tests.examples import examples

DRAWS = st.integers(0, (1 << 20) - 1)


class ChaosMachine(RuleBasedStateMachine):
    """One rule for each operation; when the rules end, everything is repaired and must be served."""

    world: ChaosWorld | None = None
    core: type[SchedulerCore] = SchedulerCore

    @initialize(seed=st.integers(0, 1 << 30))
    def start(self, seed: int) -> None:
        logging.disable(logging.CRITICAL)
        self.world = ChaosWorld(Settings.drawn(random.Random(seed)), self.core)

    @rule(name=st.sampled_from(sorted([*COMMON, CHOICES])), draw=DRAWS)
    def common(self, name: str, draw: int) -> None:
        self.apply(name, draw)

    @rule(name=st.sampled_from(sorted(FAULTS)), draw=DRAWS)
    def fault(self, name: str, draw: int) -> None:
        self.apply(name, draw)

    @rule(draw=DRAWS)
    def proceed(self, draw: int) -> None:
        self.apply("answers", draw)

    def apply(self, name: str, draw: int) -> None:
        assert self.world is not None
        self.world.apply((name, draw))

    def teardown(self) -> None:
        logging.disable(logging.NOTSET)
        if self.world is not None:
            self.world.finish()


def test_no_order_of_faults_loses_anything() -> None:
    common = examples(25, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow])
    run_state_machine_as_test(ChaosMachine, settings=common)
