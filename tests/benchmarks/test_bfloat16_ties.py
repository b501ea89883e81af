"""Near ties and flips are counted where they are known, and positions are those of the answers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.bfloat16_ties import compared, decided_again, decoded, last_place, main, measure
from engine.llama_runner import LlamaRunner
from engine.llama_weights import load_llama_weights
from engine.runner import KeyTokens, ModelShape, Segment
from tests.random_llama import random_llama
from zoo.registry import DRAFTERS, load_prompts, spread

#: Of bfloat16, between 8 and 16.
UNIT = 2.0**-4
PROMPTS = [[5, 0], [5, 4, 2], [3]]


class TableRunner:
    """A `ModelRunner` whose logits after a token are a row of a table, of another in batches."""

    key_tokens = KeyTokens(0, 0)
    num_slots = 64

    def __init__(self, alone: torch.Tensor, together: torch.Tensor) -> None:
        self.shape = ModelShape(alone.shape[1], 64, num_layers=1, kv_bytes_per_token=1)
        self._alone, self._together = alone, together

    def forward(self, segments: Sequence[Segment], keep: NDArray[np.int32]) -> torch.Tensor:
        tokens = np.concatenate([segment.tokens for segment in segments])[keep]
        return (self._alone if len(segments) == 1 else self._together)[torch.from_numpy(tokens).long()]


def table(gaps: Sequence[float]) -> torch.Tensor:
    """After token i comes the next one, and the one after that scores as much less as said."""
    found = torch.zeros(len(gaps), len(gaps))
    for token, gap in enumerate(gaps):
        found[token, (token + 1) % len(gaps)] = 12.0
        found[token, (token + 2) % len(gaps)] = 12.0 - gap
    return found


def test_units_in_the_last_place_are_those_of_bfloat16() -> None:
    values = torch.randn(500, generator=torch.Generator().manual_seed(0)).mul(20).to(torch.bfloat16)
    values = torch.cat([values, torch.tensor([1.0, -1.0, 2.0, 8.0, 15.9375], dtype=torch.bfloat16)])
    next_ones = (values.view(torch.int16) + 1).view(torch.bfloat16)
    expected = (next_ones.double() - values.double()).abs().numpy()
    assert np.array_equal(last_place(values.double().numpy()), expected)


def test_known_gaps_give_known_rates() -> None:
    # From token 5 six tokens come in turn, decided with each gap once.
    alone = table([0.0, UNIT, 1.01 * UNIT, 3.0, 3.0, 3.0])
    ties, answers = measure(
        TableRunner(alone, alone), "bfloat16", [[5]] * 4, tokens=6, batches=((2, 1), (4, 4))
    )
    assert answers == [[0, 1, 2, 3, 4, 5]] * 4
    assert (ties.answers, ties.positions, ties.ties, ties.near_ties) == (4, 24, 4, 8)
    for one in ties.batches:
        assert (one.flips, one.near_flips, one.largest_gap, one.same_answers) == (0, 0, 0.0, 4)
        assert one.largest_shift == 0.0


@pytest.mark.parametrize(("gap", "lag"), [(2.5, 0.5), (0.5, 2.5)])
def test_flips_are_found_with_their_gaps(gap: float, lag: float) -> None:
    """In batches another token follows 1, far in one of both ways to compute it, and 3, near in both."""
    alone = table([3.0, gap * UNIT, 3.0, UNIT, 3.0, 3.0])
    together = alone.clone()
    together[1, 3] = 12.0 + lag * UNIT
    together[3, 5] = 12.0 + UNIT
    runner = TableRunner(alone, together)
    ties, answers = measure(runner, "bfloat16", [[5], [2]], tokens=3, batches=((2, 1), (2, 8)))
    assert answers == [[0, 1, 2], [3, 4, 5]]
    for one in ties.batches:
        assert (one.flips, one.near_flips, one.same_answers) == (2, 1, 0)
        assert one.largest_gap == pytest.approx(2.5 * UNIT)
        assert one.largest_gap_units == pytest.approx(2.5)
        assert one.largest_shift == 0.0, "of the tokens decided alone"


def test_the_shift_of_a_logit_is_that_of_the_token_decided_alone() -> None:
    alone = table([3.0, 3.0, 3.0])
    together = alone.clone()
    together[1, 2] = 12.0 - 3 * UNIT
    (one,) = measure(TableRunner(alone, together), "bfloat16", [[2], [2]], tokens=3, batches=((2, 2),))[
        0
    ].batches
    assert (one.flips, one.same_answers) == (0, 2)
    assert one.largest_shift == pytest.approx(3 * UNIT)


def test_answers_without_a_flip_are_those_that_a_batch_decodes() -> None:
    """Of three prompts one leads to a token after which the batch goes on otherwise."""
    alone = table([3.0, 3.0, UNIT, 3.0, 3.0, 3.0])
    together = alone.clone()
    together[2, 4] = 12.5
    runner = TableRunner(alone, together)
    prompts = [[5], [3], [3]]
    first = [decoded(runner, [prompt], 4)[0] for prompt in prompts]
    again = decided_again(runner, prompts, [one.token.tolist() for one in first], 1)
    batch = decoded(runner, prompts, 4)
    same = [one.token.tolist() == other.token.tolist() for one, other in zip(first, batch, strict=True)]
    assert same == [False, True, True]
    assert compared(first, again, 3, 1).same_answers == 2


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return random_llama(0, vocab_size=90, max_position_embeddings=64)


def test_positions_are_those_of_the_answers(model: torch.nn.Module) -> None:
    """In float32 whole texts through plain Transformers decide the same, alone, in batches and in chains."""
    runner = LlamaRunner(load_llama_weights(model), 96)
    alone = [decoded(runner, [prompt], 9)[0] for prompt in PROMPTS]
    answers = [one.token.tolist() for one in alone]
    with torch.inference_mode():
        for prompt, one in zip(PROMPTS, alone, strict=True):
            ids = torch.tensor([[*prompt, *one.token[:-1].tolist()]])
            best = model(ids).logits[0, len(prompt) - 1 :].topk(2).values.double().numpy()
            assert (model(ids).logits[0, len(prompt) - 1 :].argmax(-1).numpy() == one.token).all()
            np.testing.assert_allclose(one.best, best[:, 0], atol=1e-5)
            np.testing.assert_allclose(one.gap, best[:, 0] - best[:, 1], atol=1e-5)
    for rows in (1, 4):
        for one, other in zip(alone, decided_again(runner, PROMPTS, answers, rows), strict=True):
            assert other.token.tolist() == one.token.tolist()
            assert not other.lag.any()
            np.testing.assert_allclose(other.best, one.best, atol=1e-5)
    # Along other answers a position lags, as much as the token there scores below the best.
    wrong = [[(token + 1) % 90 for token in answer] for answer in answers]
    for prompt, answer, one in zip(PROMPTS, wrong, decided_again(runner, PROMPTS, wrong, 4), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
        lags = logits.amax(-1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        np.testing.assert_allclose(one.lag, lags.numpy(), atol=1e-5)


def test_an_end_token_ends_an_answer(model: torch.nn.Module) -> None:
    runner = LlamaRunner(load_llama_weights(model), 96)
    whole = [one.token.tolist() for one in decoded(runner, PROMPTS, 9)]
    end = whole[1][4]
    ended = [one.token.tolist() for one in decoded(runner, PROMPTS, 9, (end,))]
    assert ended == [one[: one.index(end) + 1] if end in one else one for one in whole]
    assert len(ended[1]) <= 5


def test_the_command_measures_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ties.json"
    small = ["--path", f"zoo:{DRAFTERS[0]}", "--prompts", "2", "--tokens", "3"]
    assert main(["--device", "cpu", *small, "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert [one["dtype"] for one in record["results"]] == ["bfloat16", "float32"]
    assert all(2 <= one["positions"] <= 6 for one in record["results"])
    assert 0 <= record["same_in_both"] <= 2
    exact = record["results"][1]["batches"]
    assert [(one["requests"], one["rows"], one["same_answers"]) for one in exact] == [(8, 1, 2), (8, 8, 2)]
    assert "of 2 answers are the same in bfloat16 and float32" in capsys.readouterr().out


@pytest.mark.parametrize("count", [60, 100, 240, 300, 1000])
def test_prompts_are_of_all_domains_alike(count: int) -> None:
    chosen = spread(load_prompts(), count)
    assert len({(one.prompt, str(one.messages)) for one in chosen}) == len(chosen) == min(count, 480)
    counts = Counter(prompt.domain for prompt in chosen)
    assert max(counts.values()) - min(counts.values()) <= 1
