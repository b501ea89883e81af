"""Answers whose masks take ever longer: drafted for no more, and ended before everybody waits."""

from __future__ import annotations

import pytest

from engine.constraint import Constraint
from engine.sampling_params import SamplingParams
from engine.tree import TokenTree
from tests.verifier.grammars import END, make_grammars
from tests.verifier.target import Target, spec_of
from verifier import slow_masks
from verifier.messages import PrefillItem, Verdict, VerifyCall, VerifyItem
from verifier.slow_masks import MOST_S, MOST_WITH_DRAFTS_S, NUM_STEPS, SlowMasks
from verifier.verifier import Verifier

TARGET = Target()


class Clock:
    """Tells what it is set to."""

    def __init__(self) -> None:
        self.now = 7.0

    def __call__(self) -> float:
        return self.now


def after(steps: list[tuple[float, int]]) -> SlowMasks:
    """Of steps that took such times, of trees of so many nodes."""
    clock = Clock()
    masks = SlowMasks(clock)
    for seconds, num_nodes in steps:
        began = masks.begin()
        clock.now += seconds
        masks.end(began, num_nodes)
    return masks


def test_a_single_slow_step_says_nothing() -> None:
    fast, slow, dear = (MOST_WITH_DRAFTS_S / 2, 5), (MOST_WITH_DRAFTS_S * 1.1, 5), (MOST_S * 1.1, 1)
    assert not after([slow] * (NUM_STEPS - 1)).is_slow
    assert not after([slow, fast] * 9).is_slow
    assert after([fast, *[slow] * NUM_STEPS]).is_slow
    assert after([*[slow] * NUM_STEPS, fast]).is_slow, "once is for good"
    assert not after([dear] * (NUM_STEPS - 1)).error
    assert f"{MOST_S * 1.1:.1f} s of work" in after([dear] * NUM_STEPS).error


def test_what_drafts_took_ends_nobody() -> None:
    assert not after([(MOST_S * 9, 2)] * 9).error
    assert after([*[(MOST_S * 9, 2)] * 9, *[(MOST_S * 1.1, 1)] * NUM_STEPS]).error


def answer(num_steps: int) -> list[Verdict]:
    """Verdicts on an answer of so many steps without drafts, fewer if it is ended before."""
    sampling = SamplingParams(
        max_tokens=40,
        stop_token_ids=(END,),
        constraint=Constraint(kind="grammar", text='start: a\na: a a | "a"'),
        logit_bias={END: -100.0},
    )
    verifier = Verifier(TARGET.runner(), grammars=make_grammars())
    spec = spec_of("r", [5, 6, 7], sampling)
    call = VerifyCall(call_id=1, prefill=[PrefillItem(request_id="r", num_tokens=9, spec=spec)])
    first = verifier.step(call).prefills[0].verdict
    assert first is not None
    found, last = [first], first.tokens[-1]
    while len(found) < num_steps and not found[-1].error:
        item = VerifyItem(request_id="r", tree=TokenTree.root_only(last))
        (verdict,) = verifier.step(VerifyCall(call_id=1 + len(found), verify=[item])).verdicts
        found.append(verdict)
        last = verdict.tokens[-1]
    return found


def test_a_request_is_ended_with_the_tokens_that_were_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks commit them, whatever time their masks took."""
    plain = answer(8)
    assert not any(one.is_slow or one.error for one in plain)
    monkeypatch.setattr(slow_masks, "MOST_WITH_DRAFTS_S", 0.0)
    slow = answer(8)
    assert [one.is_slow for one in slow] == [False] * NUM_STEPS + [True] * (8 - NUM_STEPS)
    assert [one.tokens for one in slow] == [one.tokens for one in plain]
    monkeypatch.setattr(slow_masks, "MOST_S", 0.0)
    ended = answer(8)
    assert [one.tokens for one in ended] == [one.tokens for one in plain[: NUM_STEPS + 1]]
    assert "can be read in many ways" in ended[-1].error
