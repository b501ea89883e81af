"""Where EAGLE's drafts end: at tokens that get no children, and where no request needs another layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from engine.proposals import Proposals
from engine.sampling_params import RequestSpec
from engine.tree import TokenTree
from tests.eagle_reference import EagleReference
from tests.verifier.target import spec_of
from tests.verifier.test_eagle_drafts import (
    DEPTH,
    GREEDY,
    PROMPT,
    SAMPLED,
    TARGET,
    WIDTH,
    Checker,
    beam,
    verifier,
)
from verifier.messages import PrefillItem, Verdict, VerifyCall, VerifyItem
from verifier.verifier import Verifier

INFINITE = -math.inf


@dataclass(frozen=True)
class Ask:
    """What one request asks for."""

    depth: int = DEPTH
    width: int = WIDTH
    least: float = INFINITE
    stop_token: float = INFINITE


def prefilled(serving: Verifier, spec: RequestSpec, ask: Ask) -> Verdict:
    item = PrefillItem(
        request_id=spec.request_id,
        num_tokens=99,
        spec=spec,
        num_candidates=ask.width,
        num_heads=ask.depth,
        least_logp=ask.least,
        stop_token_logp=ask.stop_token,
    )
    (progress,) = serving.step(VerifyCall(call_id=1, prefill=[item])).prefills
    assert progress.verdict is not None
    return progress.verdict


class Pair:
    """Two greedy requests that are verified together, without drafts of their own."""

    def __init__(self, serving: Verifier) -> None:
        self.serving = serving
        self.specs = [spec_of(f"r{i}", PROMPT[i:], GREEDY) for i in range(2)]
        self.outputs = [list(prefilled(serving, spec, Ask()).tokens) for spec in self.specs]

    def proposed(self, *asks: Ask) -> list[Proposals]:
        """What comes of the next step for each."""
        items = [
            VerifyItem(
                request_id=spec.request_id,
                tree=TokenTree.root_only(output[-1]),
                num_candidates=ask.width,
                num_heads=ask.depth,
                least_logp=ask.least,
                stop_token_logp=ask.stop_token,
            )
            for spec, output, ask in zip(self.specs, self.outputs, asks, strict=True)
        ]
        found = []
        verdicts = self.serving.step(VerifyCall(call_id=5, verify=items)).verdicts
        for output, verdict in zip(self.outputs, verdicts, strict=True):
            output += verdict.tokens
            assert verdict.proposals is not None
            found.append(verdict.proposals)
        return found


def depths(proposals: Sequence[Proposals]) -> list[int]:
    return [len(one.token) for one in proposals]


def test_drafts_end_when_no_request_has_a_likely_path(tmp_path: Path) -> None:
    pair = Pair(verifier(EagleReference(TARGET.plain), tmp_path))
    likely, certain, everything = Ask(least=-50.0), Ask(least=0.0), Ask()
    assert depths(pair.proposed(certain, certain)) == [1, 1]  # nothing is certain
    assert depths(pair.proposed(certain, everything)) == [DEPTH, DEPTH]  # one of them wants it all
    assert depths(pair.proposed(likely, certain)) == [DEPTH, DEPTH]  # and nothing is that unlikely


def test_who_has_all_layers_it_asked_for_keeps_nobody_drafting(tmp_path: Path) -> None:
    pair = Pair(verifier(EagleReference(TARGET.plain), tmp_path))
    certain = Ask(least=0.0)
    assert depths(pair.proposed(Ask(depth=1, least=-50.0), certain)) == [1, 1]
    assert depths(pair.proposed(certain, Ask(depth=2))) == [2, 2]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_what_would_follow_a_stop_token_takes_no_place_in_a_beam(tmp_path: Path, params: object) -> None:
    reference = EagleReference(TARGET.plain)
    serving, check = verifier(reference, tmp_path), Checker(reference)
    spec = spec_of("a", PROMPT, params)
    proposals = prefilled(serving, spec, Ask()).proposals
    assert proposals is not None
    best, second = proposals.token[0, :2].tolist()
    assert (proposals.parent[1] < 2).any()  # else there were nothing to see
    ending = msgspec.structs.replace(spec.sampling, stop_token_ids=(60, best, second))
    spec = spec_of("b", PROMPT, ending)
    verdict = prefilled(serving, spec, Ask())
    check(verdict, spec, verdict.tokens)
    assert check.num_clear == 1


def test_a_chain_is_not_drafted_beyond_its_stop_token(tmp_path: Path) -> None:
    serving = verifier(EagleReference(TARGET.plain), tmp_path)
    first = prefilled(serving, spec_of("a", PROMPT, GREEDY), Ask(width=1)).proposals
    assert first is not None
    assert depths([first]) == [DEPTH]
    for layer in range(DEPTH - 1):
        stop = int(first.token[layer, 0])
        spec = spec_of(f"b{layer}", PROMPT, msgspec.structs.replace(GREEDY, stop_token_ids=(stop,)))
        proposals = prefilled(serving, spec, Ask(width=1, least=-50.0)).proposals
        assert proposals is not None
        ended = first.token[:, 0].tolist().index(stop) + 1
        assert proposals.token.tolist() == first.token[:ended].tolist()


@pytest.mark.parametrize("width", [1, WIDTH])
def test_nothing_is_drafted_after_a_token_that_is_not_sure_enough(tmp_path: Path, width: int) -> None:
    reference = EagleReference(TARGET.plain)
    serving, check = verifier(reference, tmp_path), Checker(reference)
    ended = 0
    for number, least in enumerate((-0.2, -0.5, -1.0, -1.5, -2.0, -3.0)):
        for prompt in (PROMPT, PROMPT[::-1], PROMPT[3:]):
            spec = spec_of(f"{number}{prompt[0]}", prompt, GREEDY)
            verdict = prefilled(serving, spec, Ask(width=width, stop_token=least))
            layers, is_clear = beam(reference, spec, verdict.tokens, DEPTH, width, least)
            if not is_clear:
                continue
            depth = sum(map(bool, layers))
            assert verdict.proposals is not None
            assert len(verdict.proposals.token) == depth
            ended += depth < DEPTH
            if all(len(layer) == width for layer in layers[:depth]):  # else it is filled up
                check(verdict, spec, verdict.tokens, depth, width, least)
    assert ended > 2
    assert check.num_clear > 2
