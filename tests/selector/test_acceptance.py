"""What is believed of drafters: from prompts of a kind, from the request itself, and from what all share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selector.acceptance import (
    INITIAL_RATE,
    NUM_ENDED,
    OWN_VARIANCE,
    SHARED_VARIANCE,
    TOKEN_VARIANCE,
    AcceptanceEstimates,
    expected_tokens,
)
from tests.examples import examples


def kind_of_prompt(rng: np.random.Generator, kind: int) -> list[int]:
    """Two templates around random words."""
    return [*range(1000 * kind, 1000 * kind + 10), *rng.integers(5000, 9000, 20).tolist(), kind]


def serve(estimates: AcceptanceEstimates, name: str, prompt: list[int], **scores: tuple[int, int]) -> None:
    estimates.begin(name, prompt)
    for drafter, (scored, agreed) in scores.items():
        estimates.observe(name, drafter, scored, agreed)
    estimates.forget(name)


def test_expected_tokens_match_a_simulation() -> None:
    rng = np.random.default_rng(0)
    for rate in (0.0, 0.3, 0.8, 1.0):
        accepted = (rng.random((20_000, 5)) < rate).cumprod(axis=1).sum(axis=1)
        assert expected_tokens(rate, 5) == pytest.approx(1 + accepted.mean(), rel=0.02)


def test_estimates_start_with_what_others_taught_and_follow_the_request() -> None:
    estimates = AcceptanceEstimates()
    for number in range(100):
        serve(estimates, f"old-{number}", [1, 2, 3], a=(10, 9))
    estimates.begin("new", [1, 2, 3])
    assert estimates.rate("new", "a") > 0.85
    estimates.observe("new", "a", 120, 0)
    assert estimates.rate("new", "a") < 0.2
    assert estimates.evidence("new", "a") == 120
    estimates.forget("new")
    estimates.begin("next", [1, 2, 3])
    assert estimates.rate("next", "a") > 0.8


def test_tokens_that_agree_in_runs_are_not_believed_each_by_itself() -> None:
    """Easy and hard places come in runs: of what its first tokens say, a part holds for the others."""
    rng = np.random.default_rng(4)
    estimates = AcceptanceEstimates()
    believed, came = [], []
    for number in range(400):
        name = str(number)
        estimates.begin(name, [1, 2, 3])
        mean = 0.75 + 0.1 * float(rng.standard_normal())
        level, agreed = 0.0, []
        for _ in range(60):  # correlated as the demo family's: by some 0.1 over the next tokens
            level = 0.9 * level + 0.45 * float(rng.standard_normal())
            agreed.append(float(rng.random()) < mean + 0.15 * level)
        estimates.observe(name, "a", 24, sum(agreed[:24]))
        if number >= 100:
            believed.append(estimates.rate(name, "a"))
            came.append(float(np.mean(agreed[24:])))
        estimates.forget(name)
    slope = float(np.polyfit(believed, came, 1)[0])
    assert 0.8 < slope < 1.25


def test_a_new_prompt_is_judged_by_those_like_it() -> None:
    rng = np.random.default_rng(1)
    estimates = AcceptanceEstimates()
    for number in range(60):
        kind = number % 2
        good, poor = (30, 27), (30, 18)
        code, chat = (good, poor) if kind else (poor, good)
        serve(estimates, str(number), kind_of_prompt(rng, kind), code=code, chat=chat)
    for kind, best, other in ((1, "code", "chat"), (0, "chat", "code")):
        estimates.begin(f"new-{kind}", kind_of_prompt(rng, kind))
        assert estimates.rate(f"new-{kind}", best) > estimates.rate(f"new-{kind}", other) + 0.15


@examples(60)
@given(
    st.dictionaries(
        st.sampled_from("abcd"), st.tuples(st.integers(1, 60), st.floats(0, 1)), min_size=0, max_size=4
    )
)
def test_the_posterior_is_that_of_the_gaussian_model(scored: dict[str, tuple[int, float]]) -> None:
    """Oracle: condition the joint Gaussian of the four rates on the counts by matrix algebra."""
    estimates = AcceptanceEstimates()
    estimates.begin("r", [1, 2, 3])
    names = "abcd"
    spreads = [estimates.prior("r", name)[1] ** 2 for name in names]
    counts = {name: (n, round(n * share)) for name, (n, share) in scored.items()}
    for name, (n, agreed) in counts.items():
        estimates.observe("r", name, n, agreed)
    prior = np.full((4, 4), SHARED_VARIANCE) + np.diag([OWN_VARIANCE + spread for spread in spreads])
    seen = [i for i, name in enumerate(names) if name in counts]
    noise = np.diag([TOKEN_VARIANCE / counts[names[i]][0] for i in seen])
    residual = np.array([counts[names[i]][1] / counts[names[i]][0] - INITIAL_RATE for i in seen])
    mean = np.full(4, INITIAL_RATE)
    if seen:
        mean = mean + prior[:, seen] @ np.linalg.solve(prior[np.ix_(seen, seen)] + noise, residual)
    found = [estimates.rate("r", name) for name in names]
    assert found == pytest.approx(np.clip(mean, 0.0, 1.0), abs=1e-9)


def test_a_hard_request_is_not_blamed_on_who_was_tried() -> None:
    estimates = AcceptanceEstimates()
    for number in range(40):
        serve(estimates, str(number), [1, 2, 3], here=(30, 26), there=(30, 24))
    estimates.begin("hard", [1, 2, 3])
    estimates.observe("hard", "here", 36, 21)
    assert estimates.rate("hard", "here") > estimates.rate("hard", "there")
    estimates.observe("hard", "there", 36, 33)
    assert estimates.rate("hard", "here") < estimates.rate("hard", "there")


def test_uncertainty_falls_as_a_drafter_is_scored() -> None:
    estimates = AcceptanceEstimates()
    estimates.begin("r", [1, 2, 3])
    spreads = [estimates.uncertainty("r", "a")]
    for _ in range(4):
        estimates.observe("r", "a", 10, 8)
        spreads.append(estimates.uncertainty("r", "a"))
    assert spreads == sorted(spreads, reverse=True)
    assert spreads[-1] < 0.5 * spreads[0]
    estimates.forget("r")
    estimates.begin("s", [1, 2, 3])
    assert estimates.uncertainty("s", "a") < spreads[0]


@examples(30)
@given(st.lists(st.tuples(st.integers(1, 10), st.floats(0, 1)), min_size=1, max_size=12))
def test_a_request_teaches_the_same_in_pieces_as_at_once(pieces: list[tuple[int, float]]) -> None:
    counts = [(n, round(n * share)) for n, share in pieces]
    whole, parts = AcceptanceEstimates(float("inf")), AcceptanceEstimates(float("inf"))
    serve(whole, "r", [4, 5, 6], a=(sum(n for n, _ in counts), sum(k for _, k in counts)))
    parts.begin("r", [4, 5, 6])
    for scored, agreed in counts:
        parts.observe("r", "a", scored, agreed)
    parts.forget("r")
    for estimates in (whole, parts):
        estimates.begin("s", [4, 5, 6])
    assert parts.prior("s", "a") == pytest.approx(whole.prior("s", "a"), rel=1e-6)


def test_scores_that_come_after_the_end_still_teach_but_not_for_ever() -> None:
    estimates = AcceptanceEstimates()
    estimates.begin("late", [1, 2, 3])
    estimates.forget("late")
    before = estimates.prior("late", "a")
    estimates.observe("late", "a", 30, 3)
    estimates.begin("next", [1, 2, 3])
    assert estimates.prior("next", "a")[0] < before[0] - 0.1
    for number in range(NUM_ENDED):
        serve(estimates, str(number), [9])
    known = estimates.prior("next", "a")
    estimates.observe("late", "a", 30, 30)
    estimates.observe("unheard of", "a", 30, 30)
    assert estimates.prior("next", "a") == known


def test_what_is_expected_of_a_drafter_holds_until_it_is_seen() -> None:
    estimates = AcceptanceEstimates()
    estimates.expect("a", rate=0.3, spread=0.3)
    estimates.expect("a", rate=0.9)
    estimates.begin("r", [1])
    assert estimates.rate("r", "a") == pytest.approx(0.3)
    assert estimates.rate("r", "b") == pytest.approx(INITIAL_RATE)
    for number in range(40):
        serve(estimates, str(number), [1], a=(20, 16))
    estimates.begin("s", [1])
    assert estimates.rate("s", "a") == pytest.approx(0.8, abs=0.03)


def test_a_drafter_that_changes_is_noticed() -> None:
    estimates = AcceptanceEstimates()
    for number in range(400):
        serve(estimates, str(number), [1, 2], a=(30, 27 if number < 300 else 15))
    estimates.begin("s", [1, 2])
    assert estimates.rate("s", "a") < 0.7
