"""Plain steps beside EAGLE's layer of which the next is begun early: what it reads of them is the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.eagle_loading import EagleFiles
from tests.eagle_reference import EagleReference
from tests.gpu.eagle_on_device import assert_same_choices, drafting
from tests.gpu.waiting import never_waiting
from tests.verifier.target import spec_of
from verifier import eagle_reading
from verifier.messages import PrefillItem, VerifyCall, VerifyItem, VerifyResult
from verifier.overlapped import OverlappedCalls
from verifier.verifier import Verifier

NAMES = ("a", "b")
STEPS = 6


def test_steps_begun_early_are_read_as_those_in_turn(
    target: Path, tmp_path: Path, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt among them, and more rows than are put off; who begins the next step never waits."""
    monkeypatch.setattr(eagle_reading, "MOST_UNREAD", 4)
    reference = EagleReference(LlamaForCausalLM.from_pretrained(target).eval(), draft_tokens=range(2, 90))
    files = EagleFiles.of(reference.write(tmp_path / "eagle"), target)
    begin = Verifier.begin_following
    found: list[tuple[dict[str, list[int]], VerifyResult]] = []
    for overlaps in (False, True):
        drafts, runner = drafting(files, target, "cuda")
        verifier = Verifier(runner, proposer=drafts, device=cuda, overlaps=overlaps)
        specs = {name: spec_of(name, [3, 14, 15 + i, 9]) for i, name in enumerate((*NAMES, "new"))}
        opening = [PrefillItem(request_id=name, num_tokens=9, spec=specs[name]) for name in NAMES]
        calls = [VerifyCall(call_id=0, prefill=opening)]
        for number in range(1, STEPS):
            names = [*NAMES, "new"] if number > 3 else NAMES
            joining = [PrefillItem(request_id="new", num_tokens=9, spec=specs["new"])] * (number == 3)
            verify = [VerifyItem(request_id=name) for name in names]
            calls.append(VerifyCall(call_id=number, verify=verify, prefill=joining))
        asking = [VerifyItem(request_id=name, num_candidates=2, num_heads=2) for name in specs]
        calls.append(VerifyCall(call_id=STEPS, verify=asking))
        tokens: dict[str, list[int]] = {}
        overlapped, num_begun = OverlappedCalls(verifier), 0
        for number, call in enumerate(calls):
            following = calls[number + 1] if number < STEPS else None
            if overlaps and number == STEPS - 2:  # shapes that are captured make the host wait
                monkeypatch.setattr(
                    Verifier, "begin_following", lambda *of: never_waiting(partial(begin, *of))
                )
            result = overlapped.answer(call, lambda following=following: following)
            num_begun += overlapped.has_begun
            for verdict in [*result.verdicts, *(one.verdict for one in result.prefills if one.verdict)]:
                tokens.setdefault(verdict.request_id, []).extend(verdict.tokens)
        monkeypatch.setattr(Verifier, "begin_following", begin)
        assert num_begun == (STEPS - 1 if overlaps else 0)  # the last asks, and waits
        found.append((tokens, result))
    assert found[0][0] == found[1][0]
    for mine, theirs in zip(found[1][1].verdicts, found[0][1].verdicts, strict=True):
        assert mine.proposals is not None
        assert theirs.proposals is not None
        assert_same_choices(mine.proposals, theirs.proposals)
