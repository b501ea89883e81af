"""Triton's kernels, run by its interpreter on a CPU, against dense attention."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine import attention_kinds, attention_tiles
from engine.attention import PaddedAttention
from engine.attention_kinds import AttentionKind, make_attention
from engine.attention_tiles import MOST_SPLITS, Tile, num_splits
from engine.cuda_graphs import GraphedRunner
from engine.device_rows import DeviceRows, all_rows
from engine.gated import gate, gate_by_triton
from engine.llama_runner import LlamaRunner
from engine.llama_weights import LlamaWeights, load_llama_weights
from engine.padded_segments import Shape, power_of_two
from engine.runner import Segment
from engine.segment_table import FIELDS, described
from engine.static_attention import MOST_COLUMNS
from engine.triton_attention import TritonAttention
from engine.triton_support import why_not_triton
from tests.engine import tiny_models
from tests.engine.test_attention import dense
from tests.engine.test_device_rows import assert_rows_are_forwarded
from tests.engine.test_static_forwards import batch

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these kernels on the GPU"),
    # Rows of padding are whatever memory held: numpy warns of it, a GPU does not.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SLOTS = 400
KINDS = ("causal", "tree", "wide")
#: A program takes the interpreter about a millisecond.
some = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
few = settings(some, max_examples=3)
shapes_of_segments = st.lists(
    st.tuples(st.integers(0, 90), st.integers(1, 9), st.sampled_from(KINDS)), min_size=1, max_size=4
)
few_segments = st.lists(
    st.tuples(st.integers(0, 90), st.integers(1, 4), st.sampled_from(KINDS)), min_size=1, max_size=2
)


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a few programs keep busy, so that keys are split now and then and tests are short."""
    monkeypatch.setattr(attention_tiles, "ENOUGH_PROGRAMS", 16)


@pytest.fixture(scope="module")
def weights() -> LlamaWeights:
    return load_llama_weights(tiny_models.build("llama"))


def filled(attention: PaddedAttention, kv_heads: int, k_dim: int, v_dim: int) -> torch.Tensor:
    """Keys and values of all slots [slots, width], in the attention's pool."""
    attention.allocate(0, kv_heads, k_dim, v_dim)
    return attention.storage(0).normal_()


@some
@given(
    shapes=shapes_of_segments,
    heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    dims=st.sampled_from([(16, 16), (24, 8)]),
    programs=st.sampled_from([1, 8, 200]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 1000),
)
def test_attention_equals_dense(
    shapes: list[tuple[int, int, str]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    programs: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Causal rows and trees in one launch, with keys split and not; unused slots hold no numbers."""
    torch.manual_seed(seed)
    segments = batch(np.random.default_rng(seed), shapes, np.random.default_rng(seed).permutation(SLOTS))
    attention = TritonAttention(SLOTS, dtype=dtype, device="cpu")
    storage = filled(attention, heads[1], *dims)
    used = np.concatenate([part for s in segments for part in (s.past, s.slots)])
    storage[np.setdiff1d(np.arange(SLOTS), used)] = torch.nan
    q = torch.randn(sum(len(s.slots) for s in segments), heads[0], dims[0]).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_tiles, "ENOUGH_PROGRAMS", programs)
        got = attention.attend(attention.plan(segments), 0, q, 0.3)
    keys, values = storage.float().split([heads[1] * dim for dim in dims], dim=1)
    expected = [
        dense(segment, keys.view(SLOTS, -1, dims[0]), values.view(SLOTS, -1, dims[1]), rows.float(), 0.3)
        for segment, rows in zip(segments, q.split([len(s.slots) for s in segments]), strict=True)
    ]
    tolerance = 1e-5 if dtype == torch.float32 else 3e-3
    torch.testing.assert_close(
        got.float().view(len(q), heads[0], dims[1]), torch.cat(expected), atol=tolerance, rtol=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dim", [16, 24])
def test_heads_are_rotated_and_stored(dim: int, dtype: torch.dtype) -> None:
    rows, heads, kv_heads = 5, 6, 2
    torch.manual_seed(0)
    segment = batch(np.random.default_rng(0), [(0, rows, "causal")], np.arange(SLOTS)[::-1])[0]
    angle = torch.rand(rows, 1, dim // 2) * 7
    rotation = torch.polar(torch.ones_like(angle), angle)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(dtype)
    stored, queries = [], []
    for attention in (
        PaddedAttention(SLOTS, dtype=dtype),
        TritonAttention(SLOTS, dtype=dtype, device="cpu"),
    ):
        attention.allocate(0, kv_heads, dim, dim)
        own = qkv.clone()
        attention.store_rotated(attention.plan([segment]), 0, own, rotation, heads)
        stored.append(attention.storage(0))
        queries.append(own[:, : heads * dim])
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(stored[1], stored[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(queries[1], queries[0], atol=tolerance, rtol=tolerance)
    assert (stored[1] != 0).any(dim=1).sum() == rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("units", [48, 1500])
def test_gates(units: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(3, 2 * units) * 3).to(dtype)
    got = gate_by_triton(gate_up)
    assert got.shape == (3, units)
    tolerance = 1e-6 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(got, gate(gate_up), atol=tolerance, rtol=tolerance)


@few
@given(steps=st.lists(few_segments, min_size=1, max_size=3), seed=st.integers(0, 1000))
def test_a_model_of_captured_forwards_equals_an_ordinary_one(
    small_gpu: None, weights: LlamaWeights, steps: list[list[tuple[int, int, str]]], seed: int
) -> None:
    """Batches of the same shape one after the other: nothing of one may be seen in the next."""
    rng = np.random.default_rng(seed)
    plain = LlamaRunner(weights, SLOTS)
    attention = TritonAttention(SLOTS + 1, dtype=torch.float32, device="cpu")
    static = GraphedRunner(LlamaRunner(weights, SLOTS + 1, attention), capture_at=1)
    for shapes in steps:
        segments = batch(rng, shapes, rng.permutation(SLOTS).astype(np.int32))
        keep = all_rows(segments)
        expected = plain.forward(segments, keep)
        torch.testing.assert_close(static.forward(segments, keep), expected, atol=1e-4, rtol=1e-4)
        assert static.key_tokens == (plain.key_tokens.real, 0)
    assert {shape.keys for shape in static.shapes} == {0}


@pytest.mark.parametrize("is_graphed", [False, True])
@few
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 20), st.integers(0, 8), st.integers(1, 4)), min_size=1, max_size=2
    ),
    is_chain=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_rows_of_the_device_are_forwarded_as_those_of_the_host(
    small_gpu: None,
    weights: LlamaWeights,
    is_graphed: bool,
    shapes: list[tuple[int, int, int]],
    is_chain: bool,
    seed: int,
) -> None:
    attention = TritonAttention(SLOTS + 1, dtype=torch.float32, device="cpu")
    runner = LlamaRunner(weights, SLOTS + 1, attention)
    assert_rows_are_forwarded(
        GraphedRunner(runner, capture_at=1) if is_graphed else runner, weights, shapes, is_chain, seed
    )


@pytest.mark.parametrize(("rows", "laid_out"), [(16, 4), (4, 4), (2, 4)])
def test_masks_are_read_as_far_as_they_were_laid_out(rows: int, laid_out: int) -> None:
    """A captured forward has room for more rows than a batch; behind its masks lies what is not theirs."""
    kernels: Any = importlib.import_module("engine.attention_kernels")
    segments, columns, guard = 3, 20, 77
    memory = torch.full((segments * max(rows, laid_out) * columns + 64,), guard, dtype=torch.uint8)
    laid = memory[: segments * laid_out * columns].random_(0, 2).view(segments, laid_out, columns)
    table = torch.zeros(segments * FIELDS, dtype=torch.int32)
    seen = torch.full((segments * rows * columns + 64,), guard, dtype=torch.uint8)
    committed = torch.tensor([5, 6, 7])
    kernels.see[(segments,)](table, committed, laid, seen, rows, laid_out, columns, BYTES=32, num_warps=4)
    expected = torch.zeros(segments, rows, columns, dtype=torch.uint8)
    expected[:, :laid_out] = laid[:, :rows]
    assert torch.equal(seen[: expected.numel()].view_as(expected), expected)
    assert (seen[expected.numel() :] == guard).all()
    assert table.view(segments, FIELDS)[:, 4:].tolist() == [
        [committed, index * rows * columns, columns] for index, committed in enumerate((5, 6, 7))
    ]


def test_wider_masks_than_a_captured_forward_holds_go_the_ordinary_way(weights: LlamaWeights) -> None:
    slots = np.arange(MOST_COLUMNS + 2, dtype=np.int32)
    runner = GraphedRunner(LlamaRunner(weights, MOST_COLUMNS + 3), capture_at=1)
    for columns, captured in ((MOST_COLUMNS + 1, 0), (MOST_COLUMNS, 1)):
        visible = np.ones((1, columns), dtype=np.bool_)
        segment = Segment(slots[:1], slots[:1], slots[-1:], slots[:-1], visible)
        runner.forward([segment], all_rows([segment]))
        assert len(runner.shapes) == captured


@pytest.mark.parametrize("is_of_device", [False, True])
def test_a_tree_at_the_end_of_the_context_may_have_more_rows_than_tokens_are_left(is_of_device: bool) -> None:
    """Trees are cut by depth: context and rows together may be more than the model's longest sequence."""
    longest, past, rows = 32, 30, 8
    weights = load_llama_weights(tiny_models.build("llama_least"), max_tokens=longest)
    plain = LlamaRunner(weights, 200)
    attention = TritonAttention(201, dtype=torch.float32, device="cpu")
    static = GraphedRunner(LlamaRunner(weights, 201, attention), capture_at=1)
    slots = np.arange(past + rows, dtype=np.int32)
    prompt = Segment(slots[:past], slots[:past], slots[:past], slots[:0])
    # A root with seven children.
    positions = np.full(rows, past + 1, dtype=np.int32)
    positions[0] = past
    visible = np.eye(rows, dtype=np.bool_)
    visible[:, 0] = True
    tree = Segment(slots[:rows], positions, slots[past:], slots[:past], visible)
    for runner in (plain, static._runner):
        runner.forward([prompt], all_rows([prompt]))
    expected = plain.forward([tree], all_rows([tree]))
    if is_of_device:
        seen = torch.from_numpy(visible).unsqueeze(0)
        on_device = DeviceRows(torch.arange(rows), torch.tensor([past]), seen)
        got = static.forward_rows([replace(tree, visible=None)], on_device)
    else:
        got = static.forward([tree], all_rows([tree]))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert static.shapes == [Shape(1, rows, 0, rows)]


def test_batches_that_read_slots_too_often_go_the_ordinary_way(weights: LlamaWeights) -> None:
    """Of many requests with one long prefix; the answers are the same."""
    attention = TritonAttention(41, dtype=torch.float32, device="cpu")
    runner, plain = GraphedRunner(LlamaRunner(weights, 41, attention), capture_at=1), LlamaRunner(weights, 40)
    slots = np.arange(40, dtype=np.int32)
    prefix = Segment(slots[:30], slots[:30], slots[:30], slots[:0])
    for each in (runner, plain):
        each.forward([prefix], all_rows([prefix]))
    captured = len(runner.shapes)
    for num_requests, is_captured in ((3, False), (2, True)):
        sharing = [
            Segment(slots[:1], slots[30:31], slots[31 + i : 32 + i], slots[:30]) for i in range(num_requests)
        ]
        got, expected = runner.forward(sharing, all_rows(sharing)), plain.forward(sharing, all_rows(sharing))
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        assert (len(runner.shapes) > captured) == is_captured


def test_kernels_are_compiled_before_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """For few queries and many, with keys split and not."""
    attention = TritonAttention(8, dtype=torch.float16, device="cpu")
    attention.allocate(0, 1, 16, 16)
    asked, summed = set(), set()
    attend = TritonAttention._attend

    def noted(*args: Any) -> torch.Tensor:
        asked.add((args[5].queries, args[6] > 1))
        summed.update({power_of_two(args[6])} - {1})
        return attend(*args)

    monkeypatch.setattr(TritonAttention, "_attend", noted)
    attention.prepare(0, 2)
    assert asked == {(queries, is_split) for queries in (16, 64) for is_split in (False, True)}
    assert summed == {2, 4, 8, 16, 32}


def test_a_batch_is_described_by_where_its_rows_keys_and_masks_begin() -> None:
    segments = batch(
        np.random.default_rng(0), [(4, 1, "causal"), (3, 2, "tree"), (0, 3, "causal")], np.arange(SLOTS)
    )
    description = described(segments)
    written = np.zeros(3 * FIELDS + 13, dtype=np.int32)
    description.write(written, 3 * FIELDS)
    table = written[: 3 * FIELDS].reshape(-1, FIELDS)
    assert table.tolist() == [[0, 1, 0, 5, 4, -1, 0], [1, 2, 5, 5, 3, 0, 2], [3, 3, 10, 3, 0, -1, 0]]
    assert written[3 * FIELDS :].tolist() == list(range(13))
    assert segments[1].visible is not None
    assert description.seen.tolist() == segments[1].visible.reshape(-1).tolist()


@given(st.integers(1, 5000), st.integers(1, 200_000), st.sampled_from([16, 32, 64]))
def test_keys_are_split_only_where_processors_would_be_idle(programs: int, keys: int, least: int) -> None:
    splits = num_splits(programs, keys, least)
    assert 1 <= splits <= MOST_SPLITS
    if splits > 1:
        assert programs * splits <= attention_tiles.ENOUGH_PROGRAMS
        tiles = -(-keys // least)
        assert -(-tiles // splits) * (splits - 1) < tiles  # none without keys


def test_batches_that_fill_a_gpu_are_not_split() -> None:
    """Those of 64 requests, with eight key heads each; of one, few keys to each part."""
    assert num_splits(64 * 8, 100_000, 32) == 1
    assert num_splits(8 * 8, 1025, 32) == 7  # of five tiles each, the last of three
    assert num_splits(8, 1025, 32) == 17
    assert num_splits(8, 1024, 32) == 32


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.thorough)])
def test_splits_sum_to_what_attention_without_them_is(dtype: torch.dtype) -> None:
    """Of segments with fewer rows or keys than the widest, too; launch by launch to the same bits."""
    torch.manual_seed(0)
    shapes = [(90, 9, "causal"), (70, 12, "tree"), (0, 1, "causal"), (40, 3, "wide"), (33, 1, "causal")]
    rng = np.random.default_rng(0)
    segments = batch(rng, shapes, rng.permutation(SLOTS))
    attention = TritonAttention(SLOTS, dtype=dtype, device="cpu")
    filled(attention, 2, 16, 24)
    plan = attention.plan(segments)
    q = torch.randn(plan.num_rows, 4, 16).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-3
    for tile in (Tile(16, 16, 2), Tile(32, 32, 2, 8)):
        whole = attention._attend(plan, 0, q, None, tile, 1)
        for splits in (3, 9):  # fewer than there are tiles of keys, and more
            first, again = (attention._attend(plan, 0, q, None, tile, splits) for _ in range(2))
            torch.testing.assert_close(first, whole, atol=tolerance, rtol=tolerance)
            assert torch.equal(first, again)


def test_where_it_cannot_serve_it_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = torch.device("cuda")
    assert make_attention("triton", 10, dtype=torch.float32).num_slots == 10
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match=r"attention `triton`: Triton needs a CUDA device, not cpu"):
        make_attention("triton", 10, dtype=torch.float32)
    monkeypatch.setenv("CC", "cc")
    with monkeypatch.context() as patch:  # Python as Debian packages it
        (tmp_path / "Python.h").touch()
        patch.setattr("sysconfig.get_default_scheme", lambda: "posix_local")
        patch.setattr(
            "sysconfig.get_path",
            lambda name, scheme="posix_local": "/usr/local" if scheme == "posix_local" else str(tmp_path),
        )
        assert why_not_triton(gpu) is None
    monkeypatch.setattr("sysconfig.get_path", lambda name, scheme: "/nowhere")
    assert "/nowhere/Python.h is missing" in (why_not_triton(gpu) or "")
    monkeypatch.delenv("CC")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "install gcc" in (why_not_triton(gpu) or "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install triton" in (why_not_triton(gpu) or "")


def test_on_cuda_it_is_the_usual_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton serves, as its interpreter does here; else FlashInfer, and padding without either."""
    made: list[str] = []
    for name in ("TritonAttention", "FlashInferAttention", "PaddedAttention"):
        monkeypatch.setattr(attention_kinds, name, lambda *_, name=name, **__: made.append(name))
    kinds: tuple[AttentionKind | None, ...] = (None, "auto")
    for triton, flashinfer in ((None, None), ("none", None), ("none", "none")):
        monkeypatch.setattr(attention_kinds, "why_not_triton", lambda _, why=triton: why)
        monkeypatch.setattr(attention_kinds, "why_not_flashinfer", lambda *_, why=flashinfer: why)
        for kind in kinds:
            make_attention(kind, 16, dtype=torch.float32, device="cuda")
    assert made[::2] == made[1::2] == ["TritonAttention", "FlashInferAttention", "PaddedAttention"]
