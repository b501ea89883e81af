"""Runners against the plain Transformers forward, and refusal of models that would be silently wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cluster.device_config import LEAST_MODEL_LEN
from engine.hf_runner import HFRunner
from engine.kv_budget import NotEnoughMemory
from engine.kv_cache import KVCache
from engine.llama_runner import LlamaRunner
from engine.loading import RunnerKind, UnsupportedModel, load_runner
from engine.runner import ModelRunner, Segment
from tests.engine import tiny_models


def logits_of(runner: ModelRunner, seed: int) -> list[torch.Tensor]:
    """Logits of a small serving session: prefill of two requests in chunks, a tree, its commit, decoding."""
    rng = np.random.default_rng(seed)
    cache = KVCache(runner.num_slots)
    outputs = []
    for name in "ab":
        cache.open(name, [0])

    def rows(name: str, n: int, visible: np.ndarray | None = None) -> Segment:
        positions = np.arange(n) if visible is None else visible.sum(axis=1) - 1
        return Segment(
            tokens=rng.integers(0, runner.shape.vocab_size, n).astype(np.int32),
            positions=(cache.length(name) + positions).astype(np.int32),
            slots=cache.reserve(name, n),
            past=cache.past(name).copy(),
            visible=visible,
        )

    def forward(segments: list[Segment]) -> None:
        total = sum(len(segment.slots) for segment in segments)
        outputs.append(runner.forward(segments, np.arange(total, dtype=np.int32)).clone())

    batch = [rows("a", 20), rows("b", 3)]
    forward(batch)
    for name, segment in zip("ab", batch, strict=True):
        cache.commit(name, segment.slots)
    tree = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=np.bool_)
    batch = [rows("a", 3, tree), rows("b", 17)]
    forward(batch)
    cache.commit("a", batch[0].slots[[0, 2]])
    cache.commit("b", batch[1].slots)
    cache.discard("a")
    forward([rows("a", 1), rows("b", 1)])
    return outputs


@pytest.mark.parametrize("name", ["llama", "llama_bias", "llama_scaled", "qwen2", "qwen3"])
def test_lean_and_transformers_runners_agree(name: str, tmp_path: Path) -> None:
    directory = tiny_models.write(name, tmp_path)
    # Both pass the self-test against the plain forward here.
    lean = load_runner(directory, num_slots=128)
    other = load_runner(directory, num_slots=128, runner="hf")
    assert isinstance(lean, LlamaRunner)
    assert isinstance(other, HFRunner)
    assert lean.shape == other.shape
    assert lean.shape.kv_bytes_per_token == 2 * 2 * 2 * (16 if name == "qwen3" else 8) * 4
    for got, expected in zip(logits_of(lean, 1), logits_of(other, 1), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("runner", ["lean", "hf"])
def test_plain_forward_is_reproduced(runner: RunnerKind, tmp_path: Path) -> None:
    directory = tiny_models.write("llama", tmp_path)
    loaded = load_runner(directory, num_slots=64, runner=runner, self_test=False)
    tokens = np.random.default_rng(0).integers(0, tiny_models.VOCABULARY, 40).astype(np.int32)
    slots = np.random.default_rng(1).permutation(64).astype(np.int32)
    logits = []
    # Chunks of one prompt, one after the other; the last keeps some rows only.
    for start, end in ((0, 25), (25, 26), (26, 40)):
        rows = np.arange(start, end, dtype=np.int32)
        segment = Segment(tokens=tokens[rows], positions=rows, slots=slots[rows], past=slots[:start])
        keep = np.arange(end - start, dtype=np.int32) if end < 40 else np.array([13, 2], dtype=np.int32)
        assert loaded.forward([segment], keep[:0]).shape == (0, tiny_models.VOCABULARY)
        logits.append(loaded.forward([segment], keep))
    model = tiny_models.build("llama")
    expected = model(torch.from_numpy(tokens).long()[None]).logits[0, [*range(26), 39, 28]]
    torch.testing.assert_close(torch.cat(logits), expected.detach(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("runner", ["lean", "hf"])
def test_half_precision_models_run(runner: RunnerKind, tmp_path: Path) -> None:
    directory = tiny_models.write("llama", tmp_path)
    exact = logits_of(load_runner(directory, num_slots=128, runner=runner), 1)
    rounded = logits_of(load_runner(directory, num_slots=128, runner=runner, dtype="bfloat16"), 1)
    for got, expected in zip(rounded, exact, strict=True):
        assert got.dtype == torch.float32
        assert float((got - expected).abs().max()) < 0.1 * float(expected.abs().max())


@pytest.mark.parametrize("name", ["gpt_neox", "gemma4"])  # Gemma 4: heads of another size in every layer
def test_other_architectures_go_through_transformers(name: str, tmp_path: Path) -> None:
    assert isinstance(load_runner(tiny_models.write(name, tmp_path), num_slots=64), HFRunner)


def test_a_longest_sequence_beyond_the_model_s_is_refused(tmp_path: Path) -> None:
    directory = tiny_models.write("llama", tmp_path)
    assert load_runner(directory, num_slots=64, max_tokens=128).shape.max_tokens == 128
    with pytest.raises(UnsupportedModel, match=r"max_model_len 129 is more than .* takes: 128"):
        load_runner(directory, num_slots=64, max_tokens=129)


def test_the_shortest_that_is_served_is_named(tmp_path: Path) -> None:
    """The configuration took fewer, and the self-test refused them without a word of the field."""
    directory, least = tiny_models.write("llama", tmp_path), LEAST_MODEL_LEN
    assert load_runner(directory, num_slots=64, max_tokens=least).shape.max_tokens == least
    with pytest.raises(UnsupportedModel, match=r"sequences of 15 tokens \(max_model_len, .* not of 14"):
        load_runner(directory, num_slots=64, max_tokens=least - 1)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"type": "linear", "factor": 2.0}, 256),  # of 128, as vicuna-16k has it
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 96}, 384),  # Qwen's cards
    ],
)
def test_scaled_rotary_embeddings_reach_further_than_the_model_s_own(
    rope: dict[str, object], longest: int, tmp_path: Path
) -> None:
    """Model cards have users add the scaling, and leave `max_position_embeddings` as it is."""
    file = tiny_models.write("qwen2", tmp_path) / "config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"]
    file.write_text(json.dumps(config | {"rope_scaling": rope}))
    assert load_runner(tmp_path, num_slots=512).shape.max_tokens == 128
    with pytest.raises(UnsupportedModel, match=rf"{longest + 1} is more than .* takes: {longest}"):
        load_runner(tmp_path, num_slots=512, max_tokens=longest + 1)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = np.random.default_rng(1).integers(0, tiny_models.VOCABULARY, longest).astype(np.int32)
    with torch.no_grad():
        expected = plain(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    numbers = np.arange(longest, dtype=np.int32)
    segment = Segment(tokens=tokens, positions=numbers, slots=numbers, past=numbers[:0])
    for kind in ("lean", "hf"):
        runner = load_runner(tmp_path, num_slots=512, max_tokens=longest, runner=kind)
        assert runner.shape.max_tokens == longest
        torch.testing.assert_close(runner.forward([segment], numbers), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["mistral_window", "qwen2_moe_window", "phimoe_window"])
def test_a_window_no_shorter_than_the_longest_sequence_is_fine(name: str, tmp_path: Path) -> None:
    directory = tiny_models.write(name, tmp_path)
    assert load_runner(directory, num_slots=64, max_tokens=64).shape.max_tokens == 64
    assert load_runner(directory, num_slots=64, max_tokens=64, runner="hf").shape.max_tokens == 64


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("qwen2_moe_window", "sliding window of 64 tokens.*max_model_len"),
        ("phimoe_window", "sliding window of 64 tokens.*max_model_len"),
        ("phi3_longrope", "rotary embeddings change .* more than 32 tokens.*max_model_len to 32"),
        ("bloom", "attention interface|position_ids"),
        ("falcon", "attention interface"),
    ],
)
def test_models_that_would_be_silently_wrong_are_refused(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        load_runner(tiny_models.write(name, tmp_path), num_slots=64)


def test_rotary_embeddings_that_change_with_length_fall_back(tmp_path: Path) -> None:
    directory = tiny_models.write("llama_dynamic", tmp_path)
    assert isinstance(load_runner(directory, num_slots=64), HFRunner)
    with pytest.raises(UnsupportedModel, match="dynamic"):
        load_runner(directory, num_slots=64, runner="lean")


def test_rotary_embeddings_that_a_long_sequence_would_change_are_fine_without_one(tmp_path: Path) -> None:
    directory = tiny_models.write("phi3_longrope", tmp_path)
    assert load_runner(directory, num_slots=64, max_tokens=32).shape.max_tokens == 32


def test_the_self_test_notices_that_a_long_neighbour_changes_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny_models.write("phi3_longrope", tmp_path)
    monkeypatch.setattr("engine.hf_runner._longest_with_fixed_rotations", lambda _: None)
    with pytest.raises(UnsupportedModel, match="self-test failed at decode beside a long sequence"):
        load_runner(directory, num_slots=64)


def test_the_self_test_notices_wrong_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny_models.write("llama", tmp_path)
    monkeypatch.setattr("engine.attention.rotate", lambda *_: None)
    with pytest.raises(UnsupportedModel, match="self-test failed at ragged prefill"):
        load_runner(directory, num_slots=64)
    load_runner(directory, num_slots=64, self_test=False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"lm_head.weight": None},
            "lack 1 weights of LlamaForCausalLM .* lm_head.weight",
        ),  # no language model
        (
            {"model.layers.1.mlp.down_proj.weight": torch.ones(32, 8)},
            "shape, .* model.layers.1.mlp.down_proj",
        ),
    ],
)
@pytest.mark.parametrize("runner", ["lean", "hf"])
def test_weights_that_transformers_would_make_up_are_refused(
    change: dict[str, torch.Tensor | None], named: str, runner: RunnerKind, tmp_path: Path
) -> None:
    file = tiny_models.write("llama_bias", tmp_path) / "model.safetensors"
    weights = load_file(file) | change
    save_file(
        {name: weight for name, weight in weights.items() if weight is not None}, file, {"format": "pt"}
    )
    with pytest.raises(UnsupportedModel, match=named):
        load_runner(tmp_path, num_slots=64, runner=runner)


def test_what_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_runner(tmp_path / "absent", num_slots=64)
    directory = tiny_models.write("llama", tmp_path)
    with pytest.raises(UnsupportedModel, match="float8"):
        load_runner(directory, num_slots=64, dtype="float8")
    (directory / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="safetensors"):
        load_runner(directory, num_slots=64)


@pytest.mark.parametrize("runner", ["lean", "hf"])
def test_a_pool_that_does_not_fit_into_memory_is_told(runner: RunnerKind, tmp_path: Path) -> None:
    directory = tiny_models.write("llama", tmp_path)
    with pytest.raises(
        NotEnoughMemory, match=r"with 100000000000000 KV slots does not fit .*lower num_slots"
    ):
        load_runner(directory, num_slots=100_000_000_000_000, runner=runner, self_test=False)
