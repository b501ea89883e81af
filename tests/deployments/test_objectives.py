"""Objectives as pure functions: what is parsed, which of several places counts, what is refused and where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.baseline import Baseline
from cluster.config import FlotillaConfig
from cluster.linear_cost import LinearCost
from cluster.stream_messages import Objective
from cluster.tier_config import MOST_MS, Target, TierConfig, check_target, multiple_of, resolve
from deployments.objectives import (
    HEADERS,
    LATENCIES,
    Asked,
    ObjectiveError,
    asked_by_fields,
    asked_by_headers,
    contract,
    first_of,
)

BASELINE = Baseline(target=LinearCost(alpha=1e-6, gamma=1e-3, delta=8e-3), overhead_s=1e-3, chunk_tokens=64)

milliseconds = st.floats(0.001, MOST_MS, allow_nan=False).map(lambda value: round(value, 3))
multiples = st.floats(0.001, 9999.0).map(lambda value: f"{value:.3f}x")
targets = st.one_of(milliseconds, multiples)
maybe = st.one_of(st.none(), targets)


@st.composite
def targets_by_latency(draw: st.DrawFn) -> dict[str, Target]:
    """TTFT is left out where e2e is named: that they agree is another test's matter."""
    named = {name: draw(maybe) for name in LATENCIES}
    if named["e2e_ms"] is not None:
        named["ttft_ms"] = None
    return {name: target for name, target in named.items() if target is not None}


def of(asked: Asked, tier: TierConfig | None = None, **more: object) -> Objective:
    tiers = {"default": tier or TierConfig()}
    fields: dict[str, object] = {"service_tier": None, "priority": None, "num_prompt": 100, "max_tokens": 50}
    fields |= more
    return contract(asked, tiers=tiers, baseline=BASELINE, **fields).terms.objective  # type: ignore[arg-type]


def in_ms(name: str, target: Target) -> float:
    """Independent of the code: what one request takes, chunk by chunk and token by token."""
    if not isinstance(target, str):
        return target
    step_ms = 1e3 * (1e-6 * 100 + 1e-3 + 8e-3 + 1e-3)
    prefill_ms = 1e3 * ((64e-3 + 8e-3 + 1e-3) + (36e-3 + 8e-3 + 1e-3))
    whole = {"tpot_ms": step_ms, "ttft_ms": prefill_ms + step_ms, "e2e_ms": prefill_ms + 50 * step_ms}
    return float(target[:-1]) * whole[name]


@given(body=targets_by_latency(), headers=targets_by_latency(), tier=targets_by_latency())
def test_the_body_comes_before_headers_and_those_before_the_tier(
    body: dict[str, Target], headers: dict[str, Target], tier: dict[str, Target]
) -> None:
    headers.pop("e2e_ms", None)
    if "e2e_ms" in body:
        headers.pop("ttft_ms", None)
    sent = {HEADERS[name][0]: str(target) for name, target in headers.items()}
    asked = first_of(asked_by_fields(body), asked_by_headers(sent))
    objective = of(asked, TierConfig.model_validate(tier))
    for name in LATENCIES:
        named = body.get(name, headers.get(name, tier.get(name)))
        expected = None if named is None else pytest.approx(in_ms(name, named))
        assert getattr(objective, name) == expected


@given(milliseconds)
def test_old_header_names_mean_the_same(value: float) -> None:
    for names in HEADERS.values():
        parsed = [asked_by_headers({name: str(value)}).targets for name in names]
        (latency, (target, _)), (other, (same, _)) = (next(iter(one.items())) for one in parsed)
        assert (latency, target) == (other, same)
        assert target == value


@given(targets)
def test_what_is_written_down_is_read_again(target: Target) -> None:
    read = check_target(target)
    assert read == target
    asked = asked_by_headers({"x-llm-d-slo-tpot-ms": str(read)})
    assert asked.targets["tpot_ms"][0] == target


@given(st.floats(0.001, 9999.0), st.floats(0.01, 1e5))
def test_a_multiple_is_of_the_baseline(factor: float, baseline_ms: float) -> None:
    text = f"{factor:.3f}x"
    assert multiple_of(text) == float(f"{factor:.3f}")
    assert resolve(text, baseline_ms) == pytest.approx(float(f"{factor:.3f}") * baseline_ms)


@given(st.one_of(st.text(max_size=12), st.floats(), st.integers(-(10**9), 10**9)))
def test_nonsense_names_its_header(value: object) -> None:
    caught: ObjectiveError | None = None
    try:
        target, place = asked_by_headers({"x-slo-ttft-ms": str(value)}).targets["ttft_ms"]
    except ObjectiveError as error:
        caught = error
    if caught is not None:
        assert caught.place == "x-slo-ttft-ms"
        assert "x-slo-ttft-ms" in caught.message
        return
    assert place == "x-slo-ttft-ms"
    assert 0 < (multiple_of(target) if isinstance(target, str) else target) <= MOST_MS


@pytest.mark.parametrize(
    "text", ["0x", "-1x", "1.2 x", "x", "1e3x", "nanx", "99999x", "0", "-3", "inf", "nan", ""]
)
def test_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(ObjectiveError, match="x-llm-d-slo-tpot-ms"):
        asked_by_headers({"x-llm-d-slo-tpot-ms": text})


def test_contradictions_name_the_later_of_the_two() -> None:
    with pytest.raises(ObjectiveError) as caught:
        asked_by_headers({"x-llm-d-slo-tpot-ms": "40", "x-slo-tpot-ms": "50"})
    assert caught.value.place == "x-slo-tpot-ms"
    assert asked_by_headers({"x-llm-d-slo-tpot-ms": "40", "x-slo-tpot-ms": "40.0"}).targets
    with pytest.raises(ObjectiveError, match="first token cannot come after the last") as caught:
        of(first_of(asked_by_fields({"e2e_ms": 100.0}), asked_by_headers({"x-slo-ttft-ms": "200"})))
    assert caught.value.place == "x-slo-ttft-ms"
    # A tier that asks for more than the client does contradicts nothing.
    assert of(asked_by_fields({"e2e_ms": 100.0}), TierConfig(ttft_ms=200.0)).ttft_ms == 200.0


def test_without_a_baseline_multiples_are_refused_and_numbers_are_not() -> None:
    asked = asked_by_fields({"tpot_ms": "2x"})
    with pytest.raises(ObjectiveError, match="give milliseconds") as caught:
        contract(asked, None, None, {}, None, 10, 10)
    assert caught.value.place == "slo.tpot_ms"
    plain = contract(asked_by_fields({"tpot_ms": 20}), None, None, {}, None, 10, 10)
    assert plain.terms.objective == Objective(tpot_ms=20.0)


TIERS = {
    "gold": TierConfig(tpot_ms=20.0, priority=-1, downgrade_to="silver"),
    "silver": TierConfig(tpot_ms=60.0, downgrade_to="bulk"),
    "bulk": TierConfig(priority=5),
}


def test_downgrades_go_down_the_tiers_on_their_own_terms() -> None:
    made = contract(Asked(), "gold", None, TIERS, BASELINE, 10, 10)
    assert made.on_miss == "downgrade"
    assert made.terms.priority == -1
    assert [(terms.tier, terms.objective.tpot_ms, terms.priority) for terms in made.downgrades] == [
        ("silver", 60.0, 0),
        ("bulk", None, 5),
    ]
    # Nobody becomes more urgent by a downgrade.
    late = contract(Asked(), "gold", 9, TIERS, BASELINE, 10, 10)
    assert [terms.priority for terms in late.downgrades] == [9, 9]
    assert contract(Asked(on_miss="reject"), "gold", None, TIERS, BASELINE, 10, 10).downgrades == ()
    with pytest.raises(ObjectiveError, match="downgrade_to") as caught:
        contract(Asked(on_miss="downgrade"), "bulk", None, TIERS, BASELINE, 10, 10)
    assert caught.value.place == "slo.on_miss"
    with pytest.raises(ObjectiveError) as caught:
        contract(Asked(), "platinum", None, TIERS, BASELINE, 10, 10)
    assert caught.value.place == "service_tier"


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        ({"a": {"downgrade_to": "b"}}, "names `b`"),
        ({"a": {"downgrade_to": "b"}, "b": {"downgrade_to": "a"}}, "a -> b -> a"),
        ({"a": {"downgrade_to": "a"}}, "circle"),
        ({"a": {"on_miss": "downgrade"}}, "needs `downgrade_to`"),
        ({"a": {"tpot_ms": "fast"}}, "tiers.a.tpot_ms"),
        ({"a": {"ttft_ms": 10, "e2e_ms": 5}}, "above e2e_ms"),
        # No request could name them.
        ({"a" * 65: {}}, "at most 64 characters"),
        ({"": {}}, "at least 1 character"),
    ],
)
def test_a_wrong_tier_is_told_when_the_configuration_is_read(tiers: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FlotillaConfig.model_validate({"target": {"path": "zoo:any"}, "tiers": tiers})


@pytest.mark.parametrize("num_prompt", [0, 1, 63, 64, 65, 640, 1000])
def test_a_prompt_takes_the_time_of_its_chunks(num_prompt: int) -> None:
    target = LinearCost(beta=1e-6, gamma=1e-4, delta=8e-3, gamma_knee=1e-3, knee_tokens=32)
    one = Baseline(target=target, overhead_s=1e-3, chunk_tokens=64)
    seconds = 0.0
    for done in range(0, num_prompt, 64):
        tokens = min(64, num_prompt - done)
        seconds += target.seconds(1, tokens, 0, tokens * (done + tokens / 2)) + one.overhead_s
    assert one.ttft_ms(num_prompt) == pytest.approx(1e3 * seconds + one.tpot_ms(num_prompt))
