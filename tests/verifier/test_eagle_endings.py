"""Where EAGLE's drafts end: at tokens that get no children, and where no request needs another layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.heads_drafter import HeadsDrafter
from drafters.messages import DraftCall, DraftItem, DraftPlan
from engine.proposals import Proposals
from engine.runner import ModelShape
from engine.sampling_params import RequestSpec
from engine.stop_rules import AdaptiveDrafter, EstimateRule, ForwardRule
from engine.tree import TokenTree
from engine.wire import Decoder, encode
from tests.drafters.test_stop_rules import depth_by_algorithm_1, rules
from tests.eagle_reference import EagleReference
from tests.examples import examples
from tests.verifier.target import MAX_TOKENS, VOCAB, spec_of
from tests.verifier.test_eagle_drafts import (
    DEPTH,
    GREEDY,
    PROMPT,
    SAMPLED,
    TARGET,
    WIDTH,
    Checker,
    beam,
    paths_of,
    verifier,
)
from verifier.eagle_beams import Growth
from verifier.eagle_ending import CALLS_UNENDED, Ending, Endings
from verifier.messages import PrefillItem, Verdict, VerifyCall, VerifyItem
from verifier.proposing import Asking
from verifier.request_state import RequestState
from verifier.verifier import Verifier

INFINITE = -math.inf
CPU = torch.device("cpu")


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


def asked_by_rule(
    serving: Verifier,
    prompts: Sequence[Sequence[int]],
    asks: Sequence[Ask],
    rule: EstimateRule | None,
    stops: tuple[int, ...] = (),
) -> list[Proposals]:
    """What is proposed with the first token of each, in one call that has the rule."""
    names = [f"r{i}" for i in range(len(prompts))]
    params = msgspec.structs.replace(GREEDY, stop_token_ids=stops)
    items = [
        PrefillItem(
            request_id=name,
            num_tokens=99,
            spec=spec_of(name, list(prompt), params),
            num_candidates=ask.width,
            num_heads=ask.depth,
            least_logp=ask.least,
            stop_token_logp=ask.stop_token,
        )
        for name, prompt, ask in zip(names, prompts, asks, strict=True)
    ]
    call = VerifyCall(call_id=1, prefill=items, release=names, stop_rule=rule)
    call = Decoder[VerifyCall](VerifyCall).decode(encode(call))
    verdicts = [one.verdict for one in serving.step(call).prefills]
    return [one.proposals for one in verdicts if one is not None and one.proposals is not None]


def depth_by_rule(rule: EstimateRule, beams: Sequence[Sequence[Sequence[float]]]) -> int:
    """Layers after which no further one is predicted to raise the estimate (SpecServe, Algorithms 1 and 3).

    Args:
        rule: the coefficients.
        beams: of each request, to its limit, per layer the probability of each path.
    """
    tokens, num_drafted, best = float(rule.num_requests), 0, -math.inf

    def estimate(expected: float, depth: int, drafted: int) -> float:
        step_s = rule.base_s + rule.token_s * drafted + rule.first_layer_s + (depth - 1) * rule.layer_s
        return -1.0 if rule.tpot_s is not None and step_s > rule.tpot_s else expected / step_s

    deepest = max(map(len, beams))
    for depth in range(1, deepest + 1):
        parents = [p for beam in beams if len(beam) >= depth > 1 for p in beam[depth - 2]]
        predicted = tokens + rule.mean_confidence * sum(parents)
        if depth > 1 and estimate(predicted, depth, num_drafted + len(parents)) <= best:
            return depth - 1
        layer = [p for beam in beams if len(beam) >= depth for p in beam[depth - 1]]
        tokens, num_drafted = tokens + sum(layer), num_drafted + len(layer)
        best = estimate(tokens, depth, num_drafted)
    return deepest


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


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Verifier:
    return verifier(EagleReference(TARGET.plain), tmp_path_factory.mktemp("plain"))


@examples(50)
@given(rules, st.lists(st.integers(1, 6), min_size=1, max_size=3), st.sampled_from([1, WIDTH]))
def test_all_beams_end_where_the_rule_evaluated_outside_says(
    plain: Verifier, rule: EstimateRule, limits: list[int], width: int
) -> None:
    prompts = [PROMPT[i:] for i in range(len(limits))]
    asks = [Ask(depth=limit, width=width) for limit in limits]
    whole = asked_by_rule(plain, prompts, asks, None)
    assert depths(whole) == limits
    beams = [[list(map(math.exp, layer.values())) for layer in paths_of(proposals)] for proposals in whole]
    depth = depth_by_rule(rule, beams)
    if width == 1:
        assert depth == depth_by_algorithm_1(rule, [np.exp(one.logp[:, 0]).tolist() for one in whole])
    for one, ended in zip(whole, asked_by_rule(plain, prompts, asks, rule), strict=True):
        assert ended.token.tolist() == one.token[:depth].tolist()


@examples(50)
@given(
    st.integers(0, 50),
    st.one_of(st.none(), rules),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.sampled_from([INFINITE, -0.5, -1.0, -2.0, -3.0]),
    st.sampled_from([INFINITE, -0.7, -1.5]),
    st.sampled_from([(), (2,), (6, 10, 38)]),
)
def test_what_is_left_out_is_what_the_drafter_in_the_cell_cuts(
    plain: Verifier,
    seed: int,
    rule: EstimateRule | None,
    depths: list[int],
    stop: float,
    stop_token: float,
    stops: tuple[int, ...],
) -> None:
    """By the same plans and rule; in service they are those of the next step."""
    prompts = [[(7 * seed + 11 * i) % VOCAB, 5, 9] for i in range(len(depths))]
    plans = [DraftPlan(depth=n, stop_logp=stop, stop_token_logp=stop_token) for n in depths]
    whole = asked_by_rule(plain, prompts, [Ask(depth=n, width=1) for n in depths], None, stops)
    ended = asked_by_rule(plain, prompts, [Ask(n, 1, stop, stop_token) for n in depths], rule, stops)
    params = msgspec.structs.replace(GREEDY, stop_token_ids=stops)

    def trees(proposals: Sequence[Proposals]) -> list[list[int]]:
        items = [
            DraftItem(
                request_id=str(number),
                start=0,
                tokens=np.zeros(0, np.int32),
                plan=plan,
                spec=spec_of(str(number), [0] * one.position, params),
                proposals=one,
            )
            for number, (plan, one) in enumerate(zip(plans, proposals, strict=True))
        ]
        drafter = HeadsDrafter(num_heads=6, vocab_size=VOCAB, max_tokens=96, kind="eagle")
        drafts = drafter.draft(DraftCall(call_id=1, items=items, stop_rule=rule)).drafts
        return [one.tree.token.tolist() for one in drafts]

    if len(whole) == len(ended) == len(depths):  # nobody ended with its first token
        assert trees(ended) == trees(whole)


def test_the_rule_is_told_of_nodes_and_of_those_that_go_on(
    plain: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of what fills a layer up after a stop token, nor of layers that a request did not ask for."""
    prompts, asks = [PROMPT, PROMPT[1:], PROMPT[2:]], [Ask(depth=2), Ask(depth=4), Ask(depth=1)]
    (first,) = asked_by_rule(plain, prompts[:1], asks[:1], None)
    stops = tuple(first.token[0, :2].tolist())
    likely = EstimateRule(
        num_requests=3, base_s=1.0, first_layer_s=0.1, layer_s=0.0, token_s=0.0, mean_confidence=1.0
    )
    told: list[list[float]] = []
    correct, pays = AdaptiveDrafter.correct, AdaptiveDrafter.pays

    def corrected(one: AdaptiveDrafter, layer: Sequence[float]) -> None:
        told.append(list(layer))
        correct(one, layer)

    def asked(one: AdaptiveDrafter, parents: Sequence[float]) -> bool:
        told.append(list(parents))
        return pays(one, parents)

    monkeypatch.setattr(AdaptiveDrafter, "correct", corrected)
    monkeypatch.setattr(AdaptiveDrafter, "pays", asked)
    found = asked_by_rule(plain, prompts, asks, likely, stops)
    assert depths(found) == [2, 4, 1]
    a, b, c = (
        [
            {path: math.exp(p) for path, p in layer.items() if not stops_before(path, stops)}
            for layer in paths_of(one)
        ]
        for one in found
    )
    assert len(a[0]) == WIDTH
    going_on = [
        [[p for path, p in layer.items() if path[-1] not in stops] for layer in beam] for beam in (a, b)
    ]
    expected = [
        [*a[0].values(), *b[0].values(), *c[0].values()],
        [*going_on[0][0], *going_on[1][0]],
        [*a[1].values(), *b[1].values()],
        going_on[1][1],
        [*b[2].values()],
        going_on[1][2],
    ]
    for mine, theirs in zip(told, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


def stops_before(path: Sequence[int], stops: Sequence[int]) -> bool:
    """Whether a path goes on after its end."""
    return any(token in stops for token in path[:-1])


def test_where_no_draft_ends_early_a_gpu_is_seldom_asked() -> None:
    endings = Endings(torch.device("cuda"))
    asked = [endings.are_asked(12) for _ in range(4 * CALLS_UNENDED)]
    assert asked == [True] * CALLS_UNENDED + ([True] + [False] * (CALLS_UNENDED - 1)) * 3
    assert endings.are_asked(3), "fewer end sooner"
    endings.ended(15, 3, 2)  # as many as 12, by powers of two, and too late
    assert not all(endings.are_asked(12) for _ in range(CALLS_UNENDED))
    endings.ended(15, 2, 3)
    assert all(endings.are_asked(12) for _ in range(CALLS_UNENDED))

    on_cpu = Endings(torch.device("cpu"))
    assert all(on_cpu.are_asked(12) for _ in range(4 * CALLS_UNENDED))


def test_beams_that_are_not_asked_about_grow_as_deep_as_they_may() -> None:
    """By a rule that ends every draft: after it has, the next are asked about again."""
    endings = Endings(torch.device("cuda"))
    shape = ModelShape(VOCAB, MAX_TOKENS, num_layers=1, kv_bytes_per_token=1)
    asking = [Asking(RequestState(spec_of("r", PROMPT, GREEDY), shape), [1], 0, 1, DEPTH, 0)]
    never = ForwardRule(rate=0.0, verify_tokens=1.0, row_tokens=1.0, forward_tokens=1.0)
    always = ForwardRule(rate=1.0, verify_tokens=0.0, row_tokens=0.0, forward_tokens=0.0)
    layer = Growth.of(asking, CPU).first(torch.tensor([[-0.5]]), torch.tensor([[3]]))

    def ends(rule: ForwardRule) -> bool:
        return not Ending(asking, DEPTH, CPU, rule, endings).another(layer)

    assert ends(never)
    assert [ends(always) for _ in range(CALLS_UNENDED)] == [False] * CALLS_UNENDED
    assert ends(never), "the first of the next eight is asked"
    assert ends(never), "and as that ended, this one"
