"""Plain steps of which the next is begun before the host knows the tokens of the one before."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from engine.loading import load_runner
from engine.sampling_params import SamplingParams
from tests.emulated_cuda import IS_NEEDED
from tests.gpu.waiting import never_waiting
from tests.verifier.target import spec_of
from verifier.messages import PrefillItem, VerifyCall, VerifyItem
from verifier.overlapped import OverlappedCalls
from verifier.verifier import Verifier

STEPS = 5 if IS_NEEDED else 40
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=3)
ASKED = [SamplingParams(temperature=0.0), SAMPLED, SamplingParams(top_k=20, min_p=0.01, seed=4)]


@pytest.mark.parametrize("attention", [pytest.param("triton", id="triton"), "padded"])
def test_steps_begun_early_decide_the_same(
    attention: str, target: Path, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fourth request joins three, which leave one after the other; who begins the next step never waits."""
    names = ["a", "b", "c"]
    newcomer = spec_of("new", [9, 26, 5], SAMPLED)
    joins = STEPS // 2
    found = []
    begin = Verifier.begin_following
    for overlaps in (False, True):
        runner = load_runner(
            target, dtype="float32", num_slots=2048, attention=attention, device="cuda", self_test=False
        )
        verifier = Verifier(runner, device=cuda, overlaps=overlaps)
        specs = [spec_of(name, [3, 14, 15, 9], asked) for name, asked in zip(names, ASKED, strict=True)]
        prefill = [PrefillItem(request_id=spec.request_id, num_tokens=9, spec=spec) for spec in specs]
        done = verifier.step(VerifyCall(call_id=0, prefill=prefill))
        tokens = {one.request_id: list(one.verdict.tokens) for one in done.prefills if one.verdict}
        steps = []
        for number in range(STEPS):
            going_on = names[: 3 - 3 * number // STEPS] + ["new"] * (number > joins)
            items = [VerifyItem(request_id=name) for name in going_on]
            opening = [PrefillItem(request_id="new", num_tokens=9, spec=newcomer)] * (number == joins)
            steps.append(VerifyCall(call_id=number, verify=items, prefill=opening))
        num_begun = 0
        calls = OverlappedCalls(verifier)
        for number, step in enumerate(steps):
            following = steps[number + 1] if number + 1 < STEPS else None
            if overlaps and number == STEPS - 2:  # shapes that are captured make the host wait
                monkeypatch.setattr(
                    Verifier, "begin_following", lambda *of: never_waiting(partial(begin, *of))
                )
            result = calls.answer(step, lambda following=following: following)
            num_begun += calls.has_begun
            verdicts = [*result.verdicts, *(one.verdict for one in result.prefills if one.verdict)]
            for verdict in verdicts:
                tokens.setdefault(verdict.request_id, []).extend(verdict.tokens)
        assert num_begun == (STEPS - 1 if overlaps else 0)
        found.append(tokens)
    assert len(found[0]["a"]) == STEPS + 1
    assert len(found[0]["new"]) == STEPS - joins
    assert found[0] == found[1]
