"""Forwards of few rows in numpy against the runner they stand in for, on the same keys and values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.factory import build_drafter
from drafters.messages import DraftCall, DraftItem, DraftPlan
from engine.llama_runner import LlamaRunner
from engine.loading import RunnerKind, load_runner
from engine.numpy_llama import NumpyLlamaRunner, in_numpy
from engine.runner import KeyTokens, ModelRunner, Segment
from engine.sampling_params import RequestSpec, SamplingParams
from tests.engine import tiny_models
from tests.engine.test_runners import logits_of
from tests.examples import examples
from zoo import registry

PAST = 12
SLOTS = 96


@pytest.mark.parametrize("name", ["llama", "llama_bias", "llama_scaled", "qwen2"])
@pytest.mark.parametrize("most_rows", [1, 4, 64])
def test_a_session_is_the_same_wherever_its_forwards_are_done(
    name: str, most_rows: int, tmp_path: Path
) -> None:
    directory = tiny_models.write(name, tmp_path)
    one, other = (load_runner(directory, num_slots=128, runner="lean") for _ in range(2))
    assert isinstance(other, LlamaRunner)
    both = NumpyLlamaRunner(other, most_rows)
    assert both.shape == one.shape
    assert both.num_slots == one.num_slots
    for got, expected in zip(logits_of(both, 1), logits_of(one, 1), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, ModelRunner]:
    """The lean runner and the numpy one of the same weights, with slots of their own."""
    directory = tiny_models.write("llama", tmp_path_factory.mktemp("models"))
    one, other = (load_runner(directory, num_slots=4 * SLOTS, runner="lean") for _ in range(2))
    assert isinstance(other, LlamaRunner)
    return one, NumpyLlamaRunner(other, 64)


@st.composite
def trees(draw: st.DrawFn) -> list[list[int]]:
    """Parents of the nodes of up to three trees, -1 for children of the last committed token."""
    return [
        [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(1, 6)))]
        for _ in range(draw(st.integers(1, 3)))
    ]


@examples(40)
@given(shapes=trees(), split=st.integers(0, 5), seed=st.integers(0, 1000), skipped=st.integers(0, 3))
def test_trees_grown_in_two_forwards(
    pair: tuple[ModelRunner, ModelRunner], shapes: list[list[int]], split: int, seed: int, skipped: int
) -> None:
    # The second forward's rows see some of the first's keys, as when a drafter goes on with its tree.
    kept: list[list[torch.Tensor]] = []
    for runner in pair:
        rng = np.random.default_rng(seed)
        prompts, first, second = [], [], []
        for number, parents in enumerate(shapes):
            slots = rng.permutation(SLOTS).astype(np.int32) + number * SLOTS
            past, own = slots[:PAST], slots[PAST : PAST + len(parents)]
            tokens = rng.integers(0, tiny_models.VOCABULARY, PAST + len(parents)).astype(np.int32)
            prompts.append(Segment(tokens[:PAST], np.arange(PAST, dtype=np.int32), past, past[:0]))
            visible = np.eye(len(parents), dtype=np.bool_)
            for node, parent in enumerate(parents):
                if parent >= 0:
                    visible[node] |= visible[parent]
            positions = (PAST - 1 + visible.sum(axis=1)).astype(np.int32)
            cut = min(split, len(parents))
            for part, low, high in ((first, 0, cut), (second, cut, len(parents))):
                if low < high:
                    part.append(
                        Segment(
                            tokens=tokens[PAST + low : PAST + high],
                            positions=positions[low:high],
                            slots=own[low:high],
                            past=np.concatenate((past, own[:low])),
                            visible=visible[low:high, :high],
                        )
                    )
        outputs = []
        for batch in (prompts, first, second):
            total = sum(len(segment.slots) for segment in batch)
            keep = np.arange(min(skipped, total - 1), total, dtype=np.int32)
            if batch:
                outputs.append(runner.forward(batch, keep).clone())
                keys = sum(len(segment.past) + len(segment.slots) for segment in batch)
                assert runner.key_tokens.real == keys
        kept.append(outputs)
    for expected, got in zip(*kept, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_padding_is_not_read(pair: tuple[ModelRunner, ModelRunner]) -> None:
    slots = np.arange(8, dtype=np.int32)
    short = Segment(slots[:1], slots[:1], slots[:1], slots[:0])
    long = Segment(slots[1:4], slots[:3], slots[1:4], slots[:0])
    pair[1].forward([short, long], np.array([0], dtype=np.int32))
    assert pair[1].key_tokens == KeyTokens(4, 0)


@pytest.mark.parametrize(
    ("name", "dtype", "runner"),
    [("qwen3", "float32", "lean"), ("llama", "bfloat16", "lean"), ("llama", "float32", "hf")],
)
def test_models_it_is_not_for_stay_as_they_are(
    name: str, dtype: str, runner: RunnerKind, tmp_path: Path
) -> None:
    loaded = load_runner(tiny_models.write(name, tmp_path), num_slots=64, dtype=dtype, runner=runner)
    assert in_numpy(loaded) is loaded


def test_of_the_demo_family_drafters_run_in_numpy_and_the_target_does_not() -> None:
    found = {}
    for name in ("drafter-summary-1x128", "drafter-general-2x192", "target-8x384"):
        loaded = load_runner(registry.weights_dir(name), num_slots=64, self_test=False)
        found[name] = isinstance(in_numpy(loaded), NumpyLlamaRunner)
    assert found == {"drafter-summary-1x128": True, "drafter-general-2x192": True, "target-8x384": False}


def test_a_drafter_proposes_what_it_does_without() -> None:
    path = str(registry.weights_dir("drafter-code-2x128"))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 4000, 20).tolist() for _ in range(3)]
    answers = []
    runners: tuple[RunnerKind, ...] = ("auto", "lean")
    for runner in runners:
        drafter = build_drafter("model", path=path, runner=runner, num_slots=1024)
        items = [
            DraftItem(
                request_id=f"r{number}",
                start=0,
                tokens=np.zeros(0, dtype=np.int32),
                plan=DraftPlan(depth=4, width=2),
                spec=RequestSpec(
                    request_id=f"r{number}",
                    tokens=prompt,
                    prompt_len=len(prompt),
                    sampling=SamplingParams(temperature=0.0, max_tokens=64),
                ),
            )
            for number, prompt in enumerate(prompts)
        ]
        answers.append(drafter.draft(DraftCall(call_id=1, items=items)).drafts)
    for got, expected in zip(*answers, strict=True):
        assert got.tree.token.tolist() == expected.tree.token.tolist()
        assert got.tree.parent.tolist() == expected.tree.parent.tolist()
        np.testing.assert_allclose(got.tree.logp, expected.tree.logp, atol=1e-4)
