"""Rows that EAGLE puts off are read before it matters, and many steps' together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.attention import PaddedPlan
from engine.eagle import EagleLayer
from engine.tree import TokenTree
from tests.eagle_reference import EagleReference
from tests.verifier.target import VOCAB, Target, spec_of
from tests.verifier.test_eagle_drafts import GREEDY, PROMPT, Checker, half_right, prefill, verifier, verify
from verifier.messages import PrefillItem, VerifyCall, VerifyItem
from verifier.verifier import Verifier

TARGET = Target()


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each of the layer's forwards."""
    found: list[int] = []
    forward = EagleLayer.forward

    def counted(
        layer: EagleLayer,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        plan: PaddedPlan,
    ) -> torch.Tensor:
        found.append(len(tokens))
        return forward(layer, hidden, tokens, positions, plan)

    monkeypatch.setattr(EagleLayer, "forward", counted)
    return found


def silent(of: Verifier, names: list[str], trees: list[TokenTree]) -> list[list[int]]:
    """A step in which nobody asks; the tokens of each."""
    items = [VerifyItem(request_id=name, tree=tree) for name, tree in zip(names, trees, strict=True)]
    return [verdict.tokens for verdict in of.step(VerifyCall(call_id=3, verify=items)).verdicts]


def opened(of: Verifier, name: str, prompt: list[int]) -> list[int]:
    """Prefill without asking."""
    item = PrefillItem(request_id=name, num_tokens=99, spec=spec_of(name, prompt, GREEDY))
    (progress,) = of.step(VerifyCall(call_id=1, prefill=[item])).prefills
    assert progress.verdict is not None
    return list(progress.verdict.tokens)


def test_who_was_not_drafted_for_catches_up_in_one_forward(tmp_path: Path, forwards: list[int]) -> None:
    reference = EagleReference(TARGET.plain)
    serving, check = verifier(reference, tmp_path), Checker(reference)
    prompts = {"a": PROMPT, "b": PROMPT[::-1]}
    outputs = {name: opened(serving, name, prompt) for name, prompt in prompts.items()}
    futures = {name: TARGET.decode(spec_of(name, prompt, GREEDY))[0] for name, prompt in prompts.items()}
    assert forwards == [len(PROMPT)] * 2  # prompts are read at once
    trees = [half_right(outputs[name], futures[name]) for name in prompts]
    for name, new in zip(prompts, silent(serving, list(prompts), trees), strict=True):
        outputs[name] += new
    for _ in range(2):
        roots = [TokenTree.root_only(output[-1]) for output in outputs.values()]
        for name, new in zip(prompts, silent(serving, list(prompts), roots), strict=True):
            outputs[name] += new
    assert len(forwards) == 2
    for name, prompt in prompts.items():
        spec = spec_of(name, prompt, GREEDY)
        verdict = verify(serving, spec, TokenTree.root_only(outputs[name][-1]))
        outputs[name] += verdict.tokens
        check(verdict, spec, outputs[name])
    # Three rows accepted, one in each of two steps, and that of the step that asked; then layers of the beam.
    assert forwards[2] == forwards[5] == 6
    assert check.num_clear > 0


def test_many_rows_put_off_are_read(
    tmp_path: Path, forwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verifier.eagle_reading.MOST_UNREAD", 3)
    reference = EagleReference(TARGET.plain)
    serving, check = verifier(reference, tmp_path), Checker(reference)
    spec = spec_of("a", PROMPT, GREEDY)
    output = opened(serving, "a", PROMPT)
    for _ in range(5):
        output += silent(serving, ["a"], [TokenTree.root_only(output[-1])])[0]
    assert forwards == [len(PROMPT), 4]
    verdict = verify(serving, spec, TokenTree.root_only(output[-1]))
    check(verdict, spec, [*output, *verdict.tokens])
    assert forwards[2] == 2


def conversation(serving: Verifier, name: str) -> list[int]:
    """A prompt and its answer, of a request that nobody was drafted for; most of it is not read yet."""
    said = [(5 * i + 1) % VOCAB for i in range(29)]
    said += opened(serving, name, said)
    for _ in range(6):
        said += silent(serving, [name], [TokenTree.root_only(said[-1])])[0]
    return said


def test_a_request_that_goes_leaves_a_prefix_that_was_read(tmp_path: Path, forwards: list[int]) -> None:
    """A conversation's next turn begins with the answer of the one before."""
    reference = EagleReference(TARGET.plain, seed=4)
    serving, check = verifier(reference, tmp_path), Checker(reference)
    said = conversation(serving, "a")
    num_before = len(forwards)
    serving.step(VerifyCall(call_id=4, release=["a"]))
    assert forwards[num_before:] == [6]
    turn = spec_of("b", [*said, 3, 9], GREEDY)
    verdict = prefill(serving, turn)
    assert forwards[num_before + 1] < 20  # most of it was shared
    check(verdict, turn, verdict.tokens)
    assert check.num_clear == 1
    # Where prefixes are dropped too, nothing of them is read.
    silent(serving, ["b"], [TokenTree.root_only(verdict.tokens[-1])])
    num_before = len(forwards)
    serving.forget_all(with_prefixes=True)
    serving.step(VerifyCall(call_id=5, release=["b"]))
    assert len(forwards) == num_before


def test_requests_of_a_scheduler_that_is_gone_leave_prefixes_that_were_read(tmp_path: Path) -> None:
    reference = EagleReference(TARGET.plain, seed=4)
    serving, check = verifier(reference, tmp_path), Checker(reference)
    said = conversation(serving, "a")
    serving.forget_all(with_prefixes=False)
    turn = spec_of("b", [*said, 3, 9], GREEDY)
    item = PrefillItem(request_id="b", num_tokens=99, spec=turn, num_candidates=3, num_heads=3)
    (progress,) = serving.step(VerifyCall(call_id=6, prefill=[item])).prefills
    assert progress.num_cached == 32
    assert progress.verdict is not None
    check(progress.verdict, turn, progress.verdict.tokens)
    assert check.num_clear == 1


def test_what_was_put_off_of_a_dropped_request_is_not_written_over_who_has_its_slots(tmp_path: Path) -> None:
    reference = EagleReference(TARGET.plain)
    serving, check = verifier(reference, tmp_path), Checker(reference)
    texts = {name: opened(serving, name, PROMPT[i:]) for i, name in enumerate(("a", "b"))}
    for _ in range(4):
        roots = [TokenTree.root_only(text[-1]) for text in texts.values()]
        for name, new in zip(texts, silent(serving, list(texts), roots), strict=True):
            texts[name] += new
    wrong = VerifyItem(request_id="a", tree=TokenTree.root_only((texts["a"][-1] + 1) % VOCAB))
    assert serving.step(VerifyCall(call_id=4, verify=[wrong])).unknown == ["a"]
    spec = spec_of("c", PROMPT[::-1] * 2, GREEDY)
    output = list(prefill(serving, spec).tokens)
    serving.step(VerifyCall(call_id=5, release=["b"]))  # all that was put off is read now
    verdict = verify(serving, spec, TokenTree.root_only(output[-1]))
    check(verdict, spec, [*output, *verdict.tokens])
    assert check.num_clear == 1
