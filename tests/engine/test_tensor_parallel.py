"""A model over two processes gives the logits of one process, and the same on both ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import CohereConfig

from engine import transformers_loading
from engine.cuda_graphs import GraphedRunner
from engine.llama_runner import LlamaRunner
from engine.loading import RunnerKind, UnsupportedModel, load_runner
from engine.tensor_parallel import check_divisible, end_loading
from tests.engine import fp8_models, integer_models, tiny_models
from tests.engine.ranks import on_two_ranks
from tests.engine.test_adapters import loaded, session, two_adapters
from tests.engine.test_heads import seen_by_heads
from tests.engine.test_runners import logits_of
from tests.verifier.target import spec_of
from verifier.messages import PrefillItem, VerifyCall, VerifyItem
from verifier.overlapped import OverlappedCalls
from verifier.verifier import Verifier

CASES: list[tuple[str, RunnerKind]] = [
    ("llama_bias", "lean"),
    ("qwen3", "hf"),
    ("gemma3_window", "hf"),
    ("qwen2_moe", "lean"),
    ("fp8", "lean"),
    ("integers", "lean"),
    ("ordered", "lean"),
    ("fp8 mixture", "lean"),
]


def _logits(rank: int, directories: list[str]) -> list[tuple[list[np.ndarray], int]]:
    outputs = []
    for directory, (_, runner) in zip(directories, CASES, strict=False):
        loaded = load_runner(directory, num_slots=128, runner=runner, tensor_parallel=(rank, 2))
        logits = [out.numpy() for out in logits_of(loaded, 1)]
        outputs.append((logits, loaded.shape.kv_bytes_per_token))
    return outputs


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    parent = tmp_path_factory.mktemp("models")
    found = [str(tiny_models.write(name, parent / name)) for name, _ in CASES[:4]]
    adapted = tiny_models.write("qwen2", parent / "adapted")
    integer_models.write("qwen3", "packed-asymmetric", parent / "integers")
    integer_models.write("llama_bias", "gptq-ordered", parent / "ordered")
    return [
        *found,
        str(fp8_models.write("qwen3", "fine-grained", parent / "fp8")),
        str(parent / "integers"),
        str(parent / "ordered"),
        str(fp8_models.write("mixtral", "fine-grained", parent / "mixture")),
        str(adapted),
        *map(str, two_adapters(adapted, parent)),
    ]


@pytest.fixture(scope="module")
def by_rank(directories: list[str]) -> tuple[Any, Any]:
    """What both ranks compute, and then how they wait: starting them takes longer than all of it."""
    return on_two_ranks(_logits_and_waiting, directories)


def test_two_ranks_equal_one_process(directories: list[str], by_rank: tuple[Any, Any]) -> None:
    (of_first, *_), (of_second, *_) = by_rank
    for index, (directory, (_, runner)) in enumerate(zip(directories, CASES, strict=False)):
        alone = load_runner(directory, num_slots=128, runner=runner)
        (first, first_bytes), (second, _) = of_first[index], of_second[index]
        assert first_bytes * 2 == alone.shape.kv_bytes_per_token
        for zero, one, expected in zip(first, second, logits_of(alone, 1), strict=True):
            assert np.array_equal(zero, one)
            torch.testing.assert_close(torch.from_numpy(zero), expected, atol=1e-4, rtol=0)


def _with_adapters(directories: list[str], **options: Any) -> list[np.ndarray]:
    model, *adapters = map(Path, directories[len(CASES) :])
    runner = loaded(model, adapters, **options)
    return [logits.numpy() for _, logits in session(runner, (1, 0, 2))]


def test_adapters_are_shared_out_over_ranks(directories: list[str], by_rank: tuple[Any, Any]) -> None:
    alone = _with_adapters(directories)
    for first, second, expected in zip(by_rank[0][5], by_rank[1][5], alone, strict=True):
        assert np.array_equal(first, second)
        np.testing.assert_allclose(first, expected, rtol=1e-4, atol=1e-4)


def _logits_and_waiting(
    rank: int, directories: list[str]
) -> tuple[
    Any, tuple[float, str], list[Any], list[list[list[int]]], list[list[np.ndarray]], list[np.ndarray]
]:
    logits, again = _logits(rank, directories), _again(rank, directories[0])
    seen = [
        seen_by_heads(directory, runner, tensor_parallel=(rank, 2))
        for directory, (_, runner) in zip(directories[:2], CASES[:2], strict=True)
    ]
    runner = load_runner(directories[0], num_slots=128, runner="lean", tensor_parallel=(rank, 2))
    assert isinstance(runner, LlamaRunner)
    # One rank hears of the next call in time to begin it first, the other never does. Captured, both must
    # pad their rows alike, or their sums would not fit.
    tokens = [
        _plain_steps(Verifier(each, overlaps=True, num_ranks=2), early=rank == 0)
        for each in (runner, GraphedRunner(runner, capture_at=2))
    ]
    adapted = _with_adapters(directories, tensor_parallel=(rank, 2))
    return logits, _alone(rank), again, tokens, seen, adapted


def _plain_steps(verifier: Verifier, early: bool) -> list[list[int]]:
    """Tokens of two requests, of which the second comes while the first is decoded, each step sent ahead."""
    calls = OverlappedCalls(verifier)
    names = ["a", "b"]
    opened = [
        PrefillItem(request_id=name, num_tokens=64, spec=spec_of(name, [5 + i, 11, 3]))
        for i, name in enumerate(names)
    ]
    steps = [VerifyCall(call_id=0, prefill=opened[:1])]
    steps.append(VerifyCall(call_id=1, verify=[VerifyItem(request_id="a")], prefill=opened[1:]))
    going_on = [VerifyItem(request_id=name) for name in names]
    steps += [VerifyCall(call_id=i, verify=going_on) for i in range(2, 9)]
    tokens: dict[str, list[int]] = {name: [] for name in names}
    num_early = 0
    for i, step in enumerate(steps):
        following = steps[i + 1] if early and i + 1 < len(steps) else None
        result = calls.answer(step, lambda following=following: following)
        num_early += calls.has_begun
        for verdict in [*result.verdicts, *(p.verdict for p in result.prefills if p.verdict is not None)]:
            tokens[verdict.request_id] += verdict.tokens
    assert num_early == (len(steps) - 2 if early else 0)  # who opens a prompt waits for one to be complete
    return list(tokens.values())


def _again(rank: int, directory: str) -> list[tuple[bool, list[np.ndarray]]]:
    """Loaded once more, and once more with the self-test on record for the first rank only.

    Of each, whether Transformers had a part in it, and logits.
    """
    found = []
    for with_record in (True, rank == 0):
        with pytest.MonkeyPatch.context() as patch:
            through = Mock(side_effect=transformers_loading.load_through_transformers)
            patch.setattr(transformers_loading, "load_through_transformers", through)
            if not with_record:
                patch.setenv("FLOTILLA_CACHE", f"{directory}/none")
            loaded = load_runner(directory, num_slots=128, runner="lean", tensor_parallel=(rank, 2))
        found.append((bool(through.called), [out.numpy() for out in logits_of(loaded, 1)]))
    return found


def _alone(rank: int) -> tuple[float, str]:
    group = torch.distributed.group.WORLD
    assert group is not None
    patience_s = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    if rank == 1:
        time.sleep(2)  # there, but elsewhere
        return patience_s, ""
    end_loading(0.3)
    try:
        torch.distributed.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return patience_s, str(error)
    return patience_s, "not alone"


def test_ranks_test_a_model_again_unless_all_of_them_have_it_on_record(by_rank: tuple[Any, Any]) -> None:
    for logits, _, again, *_ in by_rank:
        assert [through_transformers for through_transformers, _ in again] == [False, True]
        for _, repeated in again:
            assert all(map(np.array_equal, repeated, logits[0][0]))


def test_ranks_wait_long_for_each_other_while_they_load_and_not_after(
    by_rank: tuple[Any, Any],
) -> None:
    (_, (first_s, failure), *_), (_, (second_s, _), *_) = by_rank
    assert first_s == second_s == 1800
    assert "Timed out" in failure


def test_a_rank_may_begin_the_next_step_before_another_does(
    directories: list[str], by_rank: tuple[Any, Any]
) -> None:
    alone = Verifier(load_runner(directories[0], num_slots=128, runner="lean"))
    expected = _plain_steps(alone, early=False)
    assert [len(tokens) for tokens in expected] == [9, 8]
    assert by_rank[0][3] == by_rank[1][3] == [expected, expected]


def test_heads_that_speculate_see_the_hidden_states_of_one_process(
    directories: list[str], by_rank: tuple[Any, Any]
) -> None:
    for index, (directory, (_, runner)) in enumerate(zip(directories[:2], CASES[:2], strict=True)):
        alone = seen_by_heads(directory, runner)
        for first, second, expected in zip(by_rank[0][4][index], by_rank[1][4][index], alone, strict=True):
            np.testing.assert_array_equal(first, second)
            np.testing.assert_allclose(first, expected, atol=1e-4)


def test_heads_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    directory = tiny_models.write("llama_odd", tmp_path)
    with pytest.raises(UnsupportedModel, match="3 attention heads cannot be divided over 2 ranks"):
        load_runner(directory, num_slots=64, tensor_parallel=(0, 2))
    with pytest.raises(UnsupportedModel, match="1 key-value heads"):
        check_divisible(tiny_models.build("llama_odd").config, 3)


def test_what_ranks_would_fail_with_later_is_refused_before_loading(tmp_path: Path) -> None:
    directory = tiny_models.write("llama", tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "intermediate_size": 49}))
    with pytest.raises(UnsupportedModel, match=r"49 feed-forward units .* over 2 ranks .*or `runner: hf`"):
        load_runner(directory, num_slots=64, tensor_parallel=(0, 2))
    check_divisible(tiny_models.build("llama").config, 2, is_lean=True)
    cohere = CohereConfig(num_attention_heads=4, num_key_value_heads=2, intermediate_size=49)
    check_divisible(cohere, 2)  # Transformers divides unevenly
    cohere.use_qk_norm = True
    with pytest.raises(UnsupportedModel, match=r"with `use_qk_norm` cannot be divided over 2 ranks"):
        check_divisible(cohere, 2)
