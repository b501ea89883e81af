"""Logit processing against independent oracles, and Gumbel-max against the distribution it must have."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.logprobs import raw_logprobs
from engine.noise import gumbel_noise
from engine.sampling import Row, TokenHistory, decide, perturbed_scores, processed_logits
from engine.sampling_params import SamplingParams
from engine.truncation import top_p_
from tests.examples import examples

VOCAB = 300


def logits_of(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4


def processed(logits: torch.Tensor, **params: object) -> torch.Tensor:
    row = Row(SamplingParams(**params), position=0)  # type: ignore[arg-type]
    return processed_logits(logits, [row] * len(logits))


def kept(logits: torch.Tensor) -> torch.Tensor:
    return logits > -math.inf


@pytest.mark.parametrize("top_k", [1, 2, 7, 250, VOCAB, 10_000])
def test_top_k(top_k: int) -> None:
    logits = logits_of(20)
    oracle = TopKLogitsWarper(top_k)(None, logits)
    assert torch.equal(kept(processed(logits, top_k=top_k)), kept(oracle))


@given(
    values=st.lists(
        st.lists(st.sampled_from([0.0, 1.0, 1.5, 4.0, -2.0, -math.inf]), min_size=9, max_size=9),
        min_size=2,
        max_size=2,
    ).filter(lambda rows: all(max(row) > -math.inf for row in rows)),
    top_p=st.sampled_from([0.0, 0.2, 0.5, 0.9, 0.999999]),
)
def test_a_nucleus_is_the_same_without_waiting_for_its_size(values: list[list[float]], top_p: float) -> None:
    waiting = torch.tensor(values)
    sorting = waiting.clone()
    top_p_(waiting, [top_p, 0.7])
    top_p_(sorting, [top_p, 0.7], may_wait=False)
    assert torch.equal(waiting, sorting)


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("scale", [0.01, 0.3, 1.0])
def test_top_p(top_p: float, scale: float) -> None:
    logits = logits_of(20) * scale  # flat rows have a nucleus beyond the head that is sorted first
    oracle = TopPLogitsWarper(top_p)(None, logits)
    assert torch.equal(kept(processed(logits, top_p=top_p)), kept(oracle))


@pytest.mark.parametrize("min_p", [0.001, 0.05, 0.5, 1.0])
def test_min_p(min_p: float) -> None:
    logits = logits_of(20)
    oracle = MinPLogitsWarper(min_p)(None, logits)
    assert torch.equal(kept(processed(logits, min_p=min_p)), kept(oracle))


def test_truncations_chain_in_the_documented_order() -> None:
    logits = logits_of(20)
    oracle = logits / 1.7
    for step in (MinPLogitsWarper(0.02), TopKLogitsWarper(12), TopPLogitsWarper(0.8)):
        oracle = step(None, oracle)
    found = processed(logits, temperature=1.7, min_p=0.02, top_k=12, top_p=0.8)
    torch.testing.assert_close(found.softmax(-1), oracle.softmax(-1))


def test_ties_at_a_cut_stay_together() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    for params in ({"top_k": 2}, {"top_p": 0.5}):
        assert kept(processed(logits, **params)).tolist() == [[False, True, True, True, True, False]]


def test_repetition_penalty_covers_prompt_output_and_path() -> None:
    logits = logits_of(1)
    params = SamplingParams(temperature=0.0, repetition_penalty=1.4)
    row = Row(params, 3, TokenHistory([5, 9, 9], [3, 5]), path=(11, 3))
    oracle = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([[5, 9, 9, 3, 5, 11, 3]]), logits.clone())
    torch.testing.assert_close(processed_logits(logits, [row]), oracle)


@given(
    prompt=st.lists(st.integers(0, 30), min_size=1, max_size=20),
    output=st.lists(st.integers(0, 30), max_size=20),
    paths=st.lists(st.lists(st.integers(0, 30), max_size=5), min_size=1, max_size=4),
    presence=st.sampled_from([0.0, 0.6, -1.0]),
    frequency=st.sampled_from([0.0, 0.3, -0.5]),
    repetition=st.sampled_from([1.0, 1.2]),
    bias=st.dictionaries(st.integers(0, 35), st.floats(-5, 5), max_size=3),
    position=st.integers(0, 3),
)
@examples(60)
def test_shifts_against_formulas(
    prompt: list[int],
    output: list[int],
    paths: list[list[int]],
    presence: float,
    frequency: float,
    repetition: float,
    bias: dict[int, float],
    position: int,
) -> None:
    """OpenAI: mu[j] - c[j] * frequency - (c[j] > 0) * presence, over generated tokens; before that CTRL's."""
    params = SamplingParams(
        temperature=0.0,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=bias,
        min_tokens=2,
        stop_token_ids=(4, 6, 4, 99),
    )
    logits = logits_of(len(paths), vocab=31)
    # In two steps, as a request grows.
    history = TokenHistory(prompt, output[: len(output) // 2])
    history.entries()
    history.extend(output[len(output) // 2 :])
    found = processed_logits(logits, [Row(params, position, history, path) for path in paths])
    for row, path in enumerate(paths):
        counts = Counter(output + path)
        for token in range(31):
            value = float(logits[row, token]) + bias.get(token, 0.0)
            if position < 2 and token in (4, 6):
                assert found[row, token] == -math.inf
                continue
            if token in counts or token in prompt:
                value = value / repetition if value > 0 else value * repetition
            value -= counts[token] * frequency + (counts[token] > 0) * presence
            assert float(found[row, token]) == pytest.approx(value, abs=1e-4)


def test_penalties_need_a_history() -> None:
    row = Row(SamplingParams(presence_penalty=1.0), 0)
    with pytest.raises(ValueError, match="history"):
        decide(logits_of(1), [row])
    with pytest.raises(ValueError, match="descriptions"):
        decide(logits_of(2), [row])


def test_gumbel_max_has_the_processed_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, 1.5, -3.0, 0.2]).repeat(20_000, 1)
    for params in (
        SamplingParams(seed=3),
        SamplingParams(seed=4, temperature=0.6, top_p=0.9),
        SamplingParams(seed=5, temperature=1.4, top_k=4, logit_bias={3: 1.0}),
    ):
        rows = [Row(params, position) for position in range(len(logits))]
        probabilities = processed_logits(logits[:1], rows[:1]).softmax(-1)[0].double().numpy()
        observed = np.bincount(decide(logits, rows).tokens.numpy(), minlength=8)
        assert observed[probabilities == 0].sum() == 0
        expected = probabilities[probabilities > 0] / probabilities.sum() * len(logits)
        assert stats.chisquare(observed[probabilities > 0], expected).pvalue > 1e-4


def test_scores_are_log_probabilities_plus_the_noise_of_the_position() -> None:
    logits = logits_of(3)
    params = SamplingParams(seed=-7, temperature=0.8)
    scores = perturbed_scores(logits, [Row(params, 4), Row(params, 9), Row(params, 4)])
    expected = (logits / 0.8).log_softmax(-1) + gumbel_noise([-7] * 3, [4, 9, 4], VOCAB)
    torch.testing.assert_close(scores, expected)
    greedy = perturbed_scores(logits, [Row(SamplingParams(temperature=0.0), 4)] * 3)
    torch.testing.assert_close(greedy, logits.log_softmax(-1))


def test_greedy_fast_path_and_gap() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [5.0, 1.0, 2.0, 4.5]])
    before = logits.clone()
    decision = decide(logits, [Row(SamplingParams(temperature=0.0), 0)] * 2)
    assert decision.tokens.tolist() == [1, 0]  # ties go to the lowest id
    assert decision.gap.tolist() == [0.0, 0.5]
    assert torch.equal(logits, before)


@examples(60)
@given(
    logits=st.lists(st.sampled_from([-math.inf, -2.0, 0.0, 3.0, 3.0]), min_size=1, max_size=12).filter(
        lambda row: max(row) > -math.inf
    ),
    seed=st.integers(-(2**63), 2**64 - 1),
    position=st.integers(0, 99),
    biased=st.booleans(),
)
def test_a_nucleus_of_no_mass_is_the_greedy_token(
    logits: list[float], seed: int, position: int, biased: bool
) -> None:
    """Also where several are the most probable, of which noise would choose."""
    one = SamplingParams(temperature=1.0, top_p=0.0, seed=seed, logit_bias={0: 1.0} if biased else {})
    row = torch.tensor([logits])
    greedy = msgspec.structs.replace(one, temperature=0.0, top_p=1.0)
    found, expected = (decide(row, [Row(params, position)]) for params in (one, greedy))
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.gap.nan_to_num(), expected.gap.nan_to_num())


def test_extreme_settings_stay_finite() -> None:
    logits = torch.tensor([[-3e4, 3e4, 1.0, 2.0]])
    for temperature in (5e-324, 1e-46, 1e-40, 1e-30, 1e-6, 1e6):
        params = SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1, top_k=3)
        decision = decide(logits, [Row(params, 0)])
        assert not decision.gap.isnan().any()
        assert temperature > 1 or decision.tokens.tolist() == [1]
    only = SamplingParams(temperature=1.0, top_k=1)
    assert decide(logits, [Row(only, 0)]).gap.tolist() == [math.inf]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [5e-324, 1e-46, 1e-40, 1e-37, 1e-30])
def test_the_smallest_repetition_penalty_lets_in_nothing_that_is_ruled_out(
    penalty: float, temperature: float
) -> None:
    """In float32 it is 0, by which to divide is infinite, and minus infinity times it is no number."""
    logits = torch.tensor([[9.0, 4.0, 3.0, 5.0, -1.0, 8.0]])
    for ruled_out in (
        SamplingParams(bad_words=((0,),)),
        SamplingParams(allowed_token_ids=(1, 2, 4)),
        SamplingParams(min_tokens=1, stop_token_ids=(0,)),
    ):
        params = msgspec.structs.replace(ruled_out, temperature=temperature, repetition_penalty=penalty)
        decision = decide(logits, [Row(params, 0, TokenHistory([0, 1, 2, 4]))])
        assert decision.tokens.tolist() == [1]  # the likeliest of those that are to be repeated
        assert 0 < float(decision.gap[0]) < math.inf


any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    logit_bias=st.sampled_from([{}, {3: 2.0}]),
    min_tokens=st.sampled_from([0, 9]),
    stop_token_ids=st.just((1, 2)),
    seed=st.integers(0, 2**64 - 1),
)


@given(st.lists(st.tuples(any_params, st.integers(0, 20)), min_size=1, max_size=12), st.integers(0, 99))
@examples(60)
def test_a_row_does_not_depend_on_its_neighbours(
    descriptions: list[tuple[SamplingParams, int]], seed: int
) -> None:
    logits = logits_of(len(descriptions), seed)
    history = TokenHistory([1, 2, 3], [3, 4])
    rows = [Row(params, position, history) for params, position in descriptions]
    before = logits.clone()
    together = decide(logits, rows)
    assert torch.equal(logits, before)
    for i, row in enumerate(rows):
        alone = decide(logits[i : i + 1], [row])
        assert alone.tokens.item() == together.tokens[i].item()
        assert alone.gap.item() == together.gap[i].item()


def test_raw_logprobs() -> None:
    logits = logits_of(2)
    expected = logits.double().log_softmax(-1)
    for num_top in (0, 1, 5, 10_000):
        found = raw_logprobs(logits, [7, 8], num_top)
        for row, (chosen, ids, values, rank) in enumerate(found):
            assert rank == 1 + int((expected[row] > expected[row, 7 + row]).sum())
            assert chosen == pytest.approx(float(expected[row, 7 + row]), abs=1e-5)
            assert len(ids) == len(values) == min(num_top, VOCAB)
            best = expected[row].sort(descending=True).values[: len(values)].tolist()
            assert values == pytest.approx(best, abs=1e-5)
            assert [float(expected[row, i]) for i in ids] == pytest.approx(values, abs=1e-5)
