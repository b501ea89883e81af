"""Differences are explained by the reference's own scores, or stay unproven."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks.load_client import LoadResult, Outcome
from benchmarks.lossless import SAMPLED, LosslessOptions, Suite
from benchmarks.near_ties import audit, explain, first_difference, score_gap, tolerance_of
from benchmarks.prompts import Prompt
from benchmarks.transformers_engine import Reference
from benchmarks.workload import BenchRequest
from engine.sampling import Row, TokenHistory, decide
from engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class FakeReference:
    """A model whose logits after a token are a row of a table."""

    device = torch.device("cpu")

    def __init__(self, table: torch.Tensor, dtype: str = "float32") -> None:
        self._table, self.dtype = table, dtype

    def model(self, input_ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self._table[input_ids])

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def reference(table: torch.Tensor, dtype: str = "float32") -> Reference:
    return cast(Reference, FakeReference(table, dtype))


def explained(
    table: torch.Tensor,
    params: SamplingParams,
    expected: list[int],
    found: list[int],
    dtype: str = "float32",
) -> Any:
    return explain(reference(table, dtype), params, [0], expected, found, index=3, domain="code")


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 4]) == 2
    assert first_difference([1, 2], [1, 2, 4]) == 2
    assert first_difference([5], [6]) == 0


@pytest.mark.parametrize(("gap", "proven"), [(5e-5, True), (5e-3, False)])
def test_greedy_near_tie(gap: float, proven: bool) -> None:
    table = torch.zeros(4, 4)
    table[1] = torch.tensor([0.0, -1.0, 2.0, 2.0 - gap])
    difference = explained(table, GREEDY, [1, 2], [1, 3])
    assert (difference.position, difference.expected, difference.found) == (1, 2, 3)
    assert difference.gap == pytest.approx(gap, rel=0.05)
    assert difference.proven is proven


@pytest.mark.parametrize(
    ("dtype", "best", "unit"),
    [("bfloat16", 2.0, 2**-6), ("bfloat16", 20.0, 2**-3), ("float16", 2.0, 2**-9), ("float16", 1.5, 2**-10)],
)
def test_units_in_the_last_place_of_the_targets_type(dtype: str, best: float, unit: float) -> None:
    """A comparison on a GPU ended with status 1: what decides there between equals was held for a fault."""
    kind = getattr(torch, dtype)
    assert torch.tensor(best, dtype=kind) + unit == best + unit
    assert torch.tensor(best, dtype=kind) + unit / 4 == best
    for units, proven in ((2, True), (3, False)):
        table = torch.zeros(4, 4)
        table[1] = torch.tensor([0.0, -float("inf"), best, best - units * unit])
        assert explained(table, GREEDY, [1, 2], [1, 3], dtype).proven is proven
        assert not explained(table, GREEDY, [1, 2], [1, 3]).proven
    held, half = reference(table, dtype), SamplingParams(temperature=0.5)
    assert tolerance_of(held, GREEDY, table[1:2]) == 2 * unit
    assert tolerance_of(held, half, table[1:2]) == 4 * unit, "of scores, which temperature spreads"


def test_both_tokens_must_be_near_the_best() -> None:
    """Two tokens that tie with each other, far below a third, prove nothing."""
    table = torch.tensor([[9.0, 1.0, 1.0, 0.0]])
    assert not explained(table, GREEDY, [1], [2]).proven


def test_a_near_tie_does_not_excuse_what_follows_it() -> None:
    table = torch.zeros(4, 4)
    table[1] = torch.tensor([0.0, -1.0, 2.0, 2.0 - 5e-5])
    table[3] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    table[0] = torch.tensor([0.0, 1.0, 1.0 - 5e-5, 0.0])
    assert explained(table, GREEDY, [1, 2], [1, 3, 0, 1]).proven
    assert explained(table, GREEDY, [1, 2], [1, 3, 0, 2]).proven, "another near tie"
    assert not explained(table, GREEDY, [1, 2], [1, 3, 0, 3]).proven
    assert not explained(table, GREEDY, [1, 2], [1, 3, 2]).proven


def test_an_early_end_is_never_a_near_tie() -> None:
    difference = explained(torch.zeros(4, 4), GREEDY, [1, 2], [1])
    assert difference.found == -1
    assert not difference.proven


def test_edge_of_top_p() -> None:
    """Probabilities 0.5, 0.25, 0.25 - e: rounding decides whether top-p 0.75 takes in a third token."""
    table = torch.tensor([[0.5, 0.25 + 1e-7, 0.25 - 1e-7, 1e-9]]).log()
    for seed in range(200):
        inside = SamplingParams(temperature=1.0, top_p=0.7501, seed=seed)
        winner = int(decide(table, [Row(inside, 0)]).tokens[0])
        if winner == 2:
            outside = SamplingParams(temperature=1.0, top_p=0.75, seed=seed)
            loser = int(decide(table, [Row(outside, 0)]).tokens[0])
            if loser != 2:
                difference = explained(table, outside, [loser], [2])
                assert difference.at_edge
                assert difference.proven
                return
    pytest.fail("no seed puts the third token first")


@pytest.mark.parametrize("off", [1e-6, 1e-2])
@pytest.mark.parametrize("asked", [{"min_p": 0.5}, {"top_k": 2}])
def test_edges_of_min_p_and_top_k(asked: dict[str, Any], off: float) -> None:
    """The third token lies so far below the edge: only where that is little, rounding takes it in."""
    table = torch.tensor([[1.0, 0.5, 0.5, 1e-9]]).log() - torch.tensor([0.0, 0.0, off, 0.0])
    for seed in range(200):
        outside = SamplingParams(temperature=1.0, seed=seed, **asked)
        inside = SamplingParams(temperature=1.0, seed=seed)
        winner, loser = (int(decide(table, [Row(params, 0)]).tokens[0]) for params in (inside, outside))
        if winner == 2:
            assert loser != 2
            assert explained(table, outside, [loser], [2]).proven == (off < 1e-4)
            return
    pytest.fail("no seed puts the third token first")


def test_audit_reproduces_sampling() -> None:
    """What sequential decisions give, one pass over the output confirms; a changed token it denies."""
    table = torch.randn(50, 50, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=0.8, top_p=0.95, presence_penalty=0.5, repetition_penalty=1.2, seed=7)
    prompt: list[int] = [3, 4]
    output: list[int] = []
    for position in range(12):
        last = (prompt + output)[-1]
        row = Row(params, position, TokenHistory(prompt, output))
        output.append(int(decide(table[last : last + 1], [row]).tokens[0]))
    assert audit(reference(table), params, prompt, output) == output
    # What ends too early, or goes on after an end token, is not what the target alone generates.
    assert audit(reference(table), params, prompt, output[:7], max_tokens=12, end_tokens=(99,)) == output[:8]
    assert audit(reference(table), params, prompt, [], max_tokens=12, end_tokens=(99,)) == output[:1]
    assert audit(reference(table), params, prompt, output, max_tokens=12, end_tokens=(99,)) == output
    first = output.index(output[4]) + 1
    ended = audit(reference(table), params, prompt, output, max_tokens=12, end_tokens=(output[4],))
    assert ended == output[:first]
    output[5] = (output[5] + 1) % 50
    assert audit(reference(table), params, prompt, output)[5] != output[5]


class ScriptedSuite(Suite):
    """Its server gives answers that are cut to so many tokens."""

    length = 12

    async def ask(self, mode: Mapping[str, Any], extra: Mapping[str, Any], title: str) -> LoadResult:
        outcomes = []
        for asked in self.requests:
            params = self.params(mode, asked.index)
            output: list[int] = []
            for _ in range(self.length):
                output = audit(self.reference, params, [3, 4], output, max_tokens=12, end_tokens=(99,))
            outcomes.append(Outcome(asked, token_ids=output, num_output_tokens=len(output)))
        return LoadResult(outcomes, 1.0, 0.0)


@pytest.mark.parametrize(("length", "unproven"), [(12, 0), (7, 1)])
async def test_a_sampled_answer_that_ends_early_is_not_the_target_alone(length: int, unproven: int) -> None:
    """All variants of a server may cut it alike, so that only the target alone can tell."""
    held = reference(torch.randn(50, 50, generator=torch.Generator().manual_seed(0)))
    cast(Any, held).end_tokens = (99,)
    asked = BenchRequest(0, Prompt("code", text="x"), max_tokens=12)
    suite = ScriptedSuite(LosslessOptions("http://nowhere"), cast(Any, None), held, [asked], [[3, 4]])
    ScriptedSuite.length = length
    await suite.sampled("sampled", SAMPLED)
    assert [result.num_unproven for result in suite.results] == [unproven, 0]


def test_score_gap_of_an_excluded_token_is_infinite() -> None:
    table = torch.tensor([[5.0, 1.0, 0.0]])
    row = Row(SamplingParams(temperature=1.0, top_k=1, seed=1), 0)
    assert score_gap(table, [row], (0, 1)) == float("inf")
