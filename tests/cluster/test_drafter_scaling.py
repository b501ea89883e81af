"""Instances of drafters follow capacity prices: on fake time, under bursts, decay and noise."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cluster.drafter_scaling import DrafterScaling, KindLoad
from cluster.scaling_config import DrafterScalingConfig

CONFIG = DrafterScalingConfig(
    enabled=True, max_replicas=3, price_high=20.0, sustained_s=5.0, idle_s=30.0, cooldown_s=10.0
)
CALM = KindLoad(kind="small", instances=1, least=1, places=4, served=2, price=0.0)


def run(loads: list[KindLoad], instances: int = 1, step_s: float = 0.25) -> list[int]:
    """Instances after each look, changes made at once."""
    scaling, found = DrafterScaling(CONFIG), []
    for index, load in enumerate(loads):
        load = replace(load, instances=instances)
        instances = scaling.decide([load], index * step_s).get("small", instances)
        found.append(instances)
    return found


def test_a_sustained_price_adds_one_instance_at_a_time() -> None:
    scarce = replace(CALM, served=4, price=50.0)
    found = run([scarce] * 200)
    assert found[19] == 1, "before the price had lasted"
    assert found[20] == 2
    assert found[20 + 39] == 2, "within the cool-down"
    assert found[20 + 40] == 3
    assert found[-1] == 3, "never above the most"


def test_a_price_that_comes_and_goes_changes_nothing() -> None:
    scarce = replace(CALM, served=4, price=50.0)
    assert set(run(([scarce] * 19 + [CALM]) * 20)) == {1}


def test_no_instance_is_added_without_resources() -> None:
    assert set(run([replace(CALM, served=4, price=50.0, has_room=False)] * 200)) == {1}


def test_idle_instances_are_drained_down_to_the_least() -> None:
    found = run([replace(CALM, served=0)] * 400, instances=3)
    assert found[119] == 3
    assert found[120] == 2
    assert found[-1] == 1


def test_a_kind_that_somebody_scaled_below_the_least_gets_none_for_being_idle() -> None:
    """It was scaled down for good, and had another instance after a minute without requests."""
    assert set(run([replace(CALM, served=0, least=2)] * 400)) == {1}
    assert run([replace(CALM, served=4, least=2, price=50.0)] * 200)[-1] == 3


def test_an_instance_whose_places_are_needed_stays() -> None:
    assert set(run([replace(CALM, served=5)] * 400, instances=2)) == {2}


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 12), st.booleans(), st.booleans()), max_size=300),
    st.integers(1, 3),
)
def test_bounds_and_cool_down_hold_whatever_comes(
    looks: list[tuple[float, int, bool, bool]], least: int
) -> None:
    scaling, instances, changed_at = DrafterScaling(CONFIG), least, None
    for index, (price, served, is_changing, has_room) in enumerate(looks):
        now = index * 1.0
        load = KindLoad("small", instances, least, 4, served, price, is_changing, has_room)
        wanted = scaling.decide([load], now).get("small", instances)
        assert least <= wanted <= max(3, least)
        assert abs(wanted - instances) <= 1
        if wanted != instances:
            assert not is_changing
            assert changed_at is None or now - changed_at >= CONFIG.cooldown_s
            assert (price >= 20.0 and has_room) if wanted > instances else price == 0.0
            changed_at = now
        instances = wanted
