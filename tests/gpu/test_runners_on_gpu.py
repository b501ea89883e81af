"""Runners on a GPU: equal to a CPU in float32; captured and FlashInfer forwards equal to ordinary ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.attention import PaddedAttention
from engine.attention_kinds import AttentionKind, make_attention
from engine.cuda_graphs import GraphedRunner
from engine.devices import memory_of
from engine.flashinfer_attention import why_not_flashinfer
from engine.kv_budget import NotEnoughMemory
from engine.linear import Linear
from engine.llama_runner import MOST_LATE_ROWS, LlamaRunner
from engine.llama_weights import LlamaWeights, load_llama_weights
from engine.loading import RunnerKind, load_runner
from engine.noise import gumbel_noise, uniform_noise
from engine.norms import normalised_by_triton
from engine.runner import Segment
from engine.warm_up import capture, usual_batches
from tests import emulated_cuda
from tests.engine import tiny_models
from tests.engine.test_runners import logits_of
from tests.engine.test_static_forwards import batch

only_on_gpus = pytest.mark.skipif(
    emulated_cuda.IS_NEEDED, reason="needs a GPU: the emulated one does not have what is tested"
)


def test_noise_is_the_same_on_both_devices(cuda: torch.device) -> None:
    seeds, positions = [0, 1, 2**63, 2**64 - 1], [0, 7, 100_000, 2**31]
    uniform = uniform_noise(seeds, positions, 128_256, device=cuda).cpu()
    assert torch.equal(uniform, uniform_noise(seeds, positions, 128_256))
    # Two logarithms in float64, rounded to float32: the devices may differ in the last bit of few.
    noise, expected = (
        gumbel_noise(seeds, positions, 128_256, device=cuda).cpu(),
        gumbel_noise(seeds, positions, 128_256),
    )
    torch.testing.assert_close(noise, expected, atol=0, rtol=3e-7)
    assert float((noise == expected).float().mean()) > 0.9999


# Emulated, forwards of Transformers models in test_hf_runner_on_gpu.py do.
of_transformers = pytest.param("hf", marks=[pytest.mark.thorough] if emulated_cuda.IS_NEEDED else [])


@pytest.mark.parametrize("runner", ["lean", of_transformers])
def test_float32_logits_equal_those_of_a_cpu(runner: RunnerKind, target: Path, tmp_path: Path) -> None:
    # Triton's interpreter would take half a minute for the self-tests.
    attention: AttentionKind = "padded" if emulated_cuda.IS_NEEDED else "auto"
    for directory in (target, tiny_models.write("qwen3", tmp_path)):
        on_cpu = load_runner(directory, num_slots=256, runner=runner)
        on_gpu = load_runner(  # passes its self-test, too
            directory, num_slots=256, runner=runner, attention=attention, device="cuda"
        )
        assert on_gpu.num_slots == 256
        for got, expected in zip(logits_of(on_gpu, 1), logits_of(on_cpu, 1), strict=True):
            assert got.is_cuda
            torch.testing.assert_close(got.cpu(), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.thorough
def test_a_model_that_passed_is_read_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attention: AttentionKind = "padded" if emulated_cuda.IS_NEEDED else "auto"
    directory = tiny_models.write("llama_bias", tmp_path)
    first = load_runner(directory, num_slots=256, attention=attention, device="cuda")
    monkeypatch.setattr("engine.transformers_loading.read_model", None)  # to call it would fail
    second = load_runner(directory, num_slots=256, attention=attention, device="cuda")
    for got, expected in zip(logits_of(second, 1), logits_of(first, 1), strict=True):
        assert torch.equal(got, expected)


@pytest.fixture(scope="module")
def weights(target: Path) -> dict[torch.dtype, LlamaWeights]:
    from transformers import AutoModelForCausalLM

    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval()
        found[dtype] = load_llama_weights(model, device=torch.device("cuda", 0))
    return found


def ragged(rng: np.random.Generator, slots: int, past: int = 60, rows: int = 9) -> list[Segment]:
    """One to eight requests in a pool of so many slots, with fewer keys than `past` and 1 to `rows` rows."""
    kinds = ("causal", "tree", "wide")
    shapes = [
        (int(rng.integers(0, past)), int(rng.integers(1, rows + 1)), kinds[rng.integers(3)])
        for _ in range(rng.integers(1, 9))
    ]
    return batch(rng, shapes, rng.permutation(slots).astype(np.int32))


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("padded", torch.float32),
        ("triton", torch.float32),
        pytest.param("triton", torch.bfloat16, marks=only_on_gpus),
        ("flashinfer", torch.bfloat16),
    ],
)
def test_captured_forwards_equal_ordinary_ones(
    backend: AttentionKind,
    dtype: torch.dtype,
    weights: dict[torch.dtype, LlamaWeights],
    cuda: torch.device,
) -> None:
    of = weights[dtype]
    if backend == "flashinfer" and (reason := why_not_flashinfer(dtype, cuda, of.head_dim)):
        pytest.skip(reason)
    plain = LlamaRunner(of, 1000, backend)
    static = GraphedRunner(LlamaRunner(of, 1001, backend), capture_at=1)
    tolerance = 1e-3 if dtype == torch.float32 else 0.15
    rng = np.random.default_rng(0)
    for _ in range(2 if emulated_cuda.IS_NEEDED else 30):
        segments = ragged(rng, 1000)
        keep = np.arange(sum(len(s.slots) for s in segments), dtype=np.int32)
        for _ in range(2):  # capture, then replay
            expected, got = plain.forward(segments, keep), static.forward(segments, keep)
            torch.testing.assert_close(got, expected, atol=tolerance, rtol=1e-2)
    assert static.shapes


@pytest.mark.thorough
def test_usual_batches_are_captured_when_loading(
    weights: dict[torch.dtype, LlamaWeights], monkeypatch: pytest.MonkeyPatch
) -> None:
    if emulated_cuda.IS_NEEDED:
        monkeypatch.setattr("engine.warm_up.CAPTURED_REQUESTS", (1, 2))
        monkeypatch.setattr("engine.warm_up.CAPTURED_WITH_PROMPT", (2,))
        monkeypatch.setattr("engine.warm_up.MOST_PROMPT_ROWS", 32)
    static = GraphedRunner(LlamaRunner(weights[torch.float32], 1001, "triton"))
    capture(static)
    before = static.shapes
    assert len(before) == len(usual_batches(is_rectangle=False))
    plain = LlamaRunner(weights[torch.float32], 1000, "triton")
    segments = batch(
        np.random.default_rng(0), [(0, 3, "tree"), (0, 1, "causal")], np.arange(1000, dtype=np.int32)
    )
    keep = np.arange(4, dtype=np.int32)
    for _ in range(2):
        expected, got = plain.forward(segments, keep), static.forward(segments, keep)
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-2)
    assert static.shapes == before


def test_all_captures_share_a_stream_and_let_other_threads_be(
    weights: dict[torch.dtype, LlamaWeights], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stream that multiplies has a workspace of cuBLAS for good."""
    streams: list[torch.cuda.Stream] = []
    rehearse, graph, usual = torch.cuda.stream, torch.cuda.graph, torch.cuda.current_stream()

    def noted(stream: torch.cuda.Stream) -> Any:
        if stream is not usual:
            streams.append(stream)
        return rehearse(stream)

    def noted_graph(*args: Any, stream: torch.cuda.Stream, **options: Any) -> Any:
        assert options["capture_error_mode"] == "thread_local"
        streams.append(stream)
        return graph(*args, stream=stream, **options)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: usual)
    monkeypatch.setattr(torch.cuda, "stream", noted)
    monkeypatch.setattr(torch.cuda, "graph", noted_graph)
    for _ in range(2):
        static = GraphedRunner(LlamaRunner(weights[torch.float32], 1001, "padded"), capture_at=1)
        for rows in (1, 3):
            segments = batch(np.random.default_rng(0), [(5, rows, "causal")], np.arange(1000, dtype=np.int32))
            static.forward(segments, np.arange(rows, dtype=np.int32))
        assert len(static.shapes) == 2
    assert len(streams) >= 8
    assert len(set(map(id, streams))) == 1


def test_logits_are_widened_where_they_are_left_and_taken_from_there(
    weights: dict[torch.dtype, LlamaWeights],
    emulated: emulated_cuda.Emulation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The largest tensors of a forward: not once more for the sake of float32, nor if all are wanted."""
    runner = LlamaRunner(weights[torch.bfloat16], 1001, "padded")
    computed, compute = [], runner.compute

    def noted(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = compute(*args)
        computed.append(found[0].dtype)
        return found

    monkeypatch.setattr(runner, "compute", noted)
    static = GraphedRunner(runner, capture_at=1)
    segments = batch(
        np.random.default_rng(0), [(5, 2, "causal"), (3, 2, "causal")], np.arange(1000, dtype=np.int32)
    )
    keep = np.arange(4, dtype=np.int32)
    static.forward(segments, keep)
    before = len(emulated.launches)
    logits = static.forward(segments, keep)
    assert emulated.launches[before:] == ["replay"]
    assert computed == [torch.bfloat16] * 2
    assert logits.dtype == torch.float32
    plain = LlamaRunner(weights[torch.bfloat16], 1000, "padded")
    expected = plain.forward(segments, keep)
    torch.testing.assert_close(logits, expected, atol=0.15, rtol=1e-2)
    some = static.forward(segments, keep[1::2])
    torch.testing.assert_close(some, expected[1::2], atol=0.15, rtol=1e-2)
    for rows, found in ((keep, 4), (keep[1::2], 2)):
        static.forward(segments, rows)
        hidden = static.last_hidden(np.arange(found, dtype=np.int32))
        plain.forward(segments, rows)
        torch.testing.assert_close(
            hidden, plain.last_hidden(np.arange(found, dtype=np.int32)), atol=0.1, rtol=0.05
        )


def test_a_product_is_added_to_what_is_there_without_a_copy_of_it(cuda: torch.device) -> None:
    torch.manual_seed(0)
    weight, bias, x, residual = (torch.randn(size) for size in ((6, 4), (6,), (3, 4), (3, 6)))
    expected = (x.double() @ weight.double().t() + bias + residual).float()
    there = residual.to(cuda)
    got = Linear(weight.to(cuda), bias.to(cuda)).add_to(there, x.to(cuda))
    assert got.data_ptr() == there.data_ptr()
    torch.testing.assert_close(got.cpu(), expected, atol=1e-4, rtol=1e-4)


@only_on_gpus  # without, see tests/engine/test_norms.py
def test_norms_equal_those_of_torch(cuda: torch.device) -> None:
    torch.manual_seed(0)
    gain = torch.randn(4096, device=cuda).bfloat16()
    for rows in (1, 64, 1000):
        x = torch.randn(rows, 4096, device=cuda).bfloat16() * 3
        for one in (None, gain):
            expected = F.rms_norm(x.float(), (4096,), None if one is None else one.float(), 1e-5)
            found = normalised_by_triton(x, one, 1e-5).float()
            torch.testing.assert_close(found, expected, atol=2e-2, rtol=8e-3)


@pytest.mark.parametrize(("rows", "of_a_layer"), [(MOST_LATE_ROWS, 0), (MOST_LATE_ROWS + 1, 2)])
def test_norms_of_few_rows_are_left_to_who_reads_the_products(
    rows: int, of_a_layer: int, weights: dict[torch.dtype, LlamaWeights], emulated: emulated_cuda.Emulation
) -> None:
    """All but the last norm."""
    runner = LlamaRunner(weights[torch.float32], 100, "triton")
    slots = np.arange(rows, dtype=np.int32)
    before = len(emulated.launches)
    logits = runner.forward([Segment(slots, slots, slots, slots[:0])], slots)
    assert emulated.launches[before:].count("normalise") == of_a_layer * runner.shape.num_layers + 1
    plain = LlamaRunner(weights[torch.float32], 100, "padded")
    expected = plain.forward([Segment(slots, slots, slots, slots[:0])], slots)
    torch.testing.assert_close(logits.cpu(), expected.cpu(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("backend", ["padded", "triton"])
def test_a_replay_waits_for_nothing(backend: AttentionKind, weights: dict[torch.dtype, LlamaWeights]) -> None:
    static = GraphedRunner(LlamaRunner(weights[torch.float32], 1001, backend), capture_at=1)
    segments = ragged(np.random.default_rng(1), 1000)
    keep = np.arange(sum(len(s.slots) for s in segments), dtype=np.int32)
    static.forward(segments, keep)
    torch.cuda.set_sync_debug_mode("error")
    try:
        static.forward(segments, keep)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@only_on_gpus  # without, see tests/engine/test_triton_attention.py
@pytest.mark.parametrize(
    ("backend", "dtype", "dim"),
    [
        ("triton", torch.float32, 64),
        ("triton", torch.float32, 128),
        ("triton", torch.bfloat16, 96),
        ("triton", torch.bfloat16, 128),
        ("triton", torch.float16, 256),
        ("flashinfer", torch.bfloat16, 64),
        ("flashinfer", torch.float16, 64),
    ],
)
def test_kernels_equal_padded_attention(
    backend: AttentionKind, dtype: torch.dtype, dim: int, cuda: torch.device
) -> None:
    if backend == "flashinfer" and (reason := why_not_flashinfer(dtype, cuda, dim)):
        pytest.skip(reason)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    slots = 3000
    padded = PaddedAttention(slots, dtype=dtype, device=cuda)
    paged = make_attention(backend, slots, dtype=dtype, device=cuda, head_dim=dim)
    for turn in range(40):
        # Few keys, then enough for splits of them.
        segments = ragged(rng, slots) if turn % 2 else ragged(rng, slots, past=300, rows=16)
        earlier = [
            Segment(tokens=s.past, positions=s.past, slots=s.past, past=s.past[:0])
            for s in segments
            if len(s.past)
        ]
        for part in filter(None, (earlier, segments)):
            rows = sum(len(segment.slots) for segment in part)
            q, k, v = (torch.randn(rows, heads, dim, dtype=dtype, device=cuda) for heads in (8, 2, 2))
            out = [backend.run(backend.plan(part), 0, q, k, v, 0.125) for backend in (padded, paged)]
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out[1], out[0], atol=tolerance, rtol=tolerance)


@only_on_gpus
def test_automatic_slots_keep_to_the_budget(target: Path, cuda: torch.device) -> None:
    before = torch.cuda.memory_allocated(cuda)
    # What the budget does not count, some 150 MiB of captured forwards and of cuBLAS, is to be 2 % of it.
    runner = load_runner(target, num_slots="auto", memory_fraction=0.25, device_share=0.5, device="cuda")
    used = torch.cuda.memory_allocated(cuda) - before
    budget = memory_of(cuda).total * 0.25 * 0.5
    assert 0.7 * budget < used <= 1.02 * budget
    assert runner.num_slots > 1000


def test_too_many_slots_are_refused_with_figures(target: Path) -> None:
    with pytest.raises(NotEnoughMemory, match=r"1000000000 KV slots need .* GiB on cuda:0.*free"):
        load_runner(target, num_slots=10**9, device="cuda", self_test=False)
