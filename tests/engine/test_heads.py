"""Decoding heads equal a plain computation on Transformers' hidden states, whatever the runner or batch."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engine.eagle import FeatureRunner
from engine.heads import DecodingHeads, load_heads, save_heads
from engine.heads_config import (
    KIND,
    HeadsDescription,
    UnsuitableHeads,
    read_description,
    weights_digest,
)
from engine.hf_runner import HFRunner
from engine.llama_runner import LlamaRunner
from engine.llama_weights import load_llama_weights
from engine.loading import RunnerKind, load_runner
from engine.runner import ModelRunner, Segment
from tests.engine import tiny_models

NUM_HEADS, SCALE = 3, 2.5
LENGTHS = (5, 9, 2)


def head_weights(width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(NUM_HEADS, width, width, generator=torch.Generator().manual_seed(seed)) * 0.3


def sharp(name: str) -> PreTrainedModel:
    """A tiny model whose final norm scales every dimension differently."""
    model = tiny_models.build(name).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("model.norm.weight"):
                parameter.copy_(torch.linspace(0.5, 2.0, len(parameter)))
    return model


def prompts(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, vocab_size, n).tolist() for n in LENGTHS]


@torch.no_grad()
def reference(
    model: PreTrainedModel, tokens: list[int], last_token: int, weight: torch.Tensor
) -> torch.Tensor:
    """float32 [heads, vocab] from the last hidden state after `tokens`, all written out."""
    hidden = model.base_model(torch.tensor([tokens])).last_hidden_state[0, -1]
    x = hidden + SCALE * model.get_input_embeddings()(torch.tensor(last_token))
    blocks = [hidden + torch.nn.functional.silu(w @ x) for w in weight]
    return model.get_output_embeddings()(torch.stack(blocks)).float()


def evaluate(runner: ModelRunner, weight: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Logits of the heads after each prompt, and the last tokens they were told, in one forward."""
    segments, keep, first = [], [], 0
    for tokens in prompts(runner.shape.vocab_size):
        numbers = np.arange(len(tokens), dtype=np.int32)
        slots = numbers + np.int32(first)
        segments.append(Segment(np.array(tokens, np.int32), numbers, slots, numbers[:0]))
        keep += [first, first + len(tokens) - 1]  # the heads are asked for the second of each
        first += len(tokens)
    logits = runner.forward(segments, np.array(keep, np.int32))
    last = logits[1::2].argmax(dim=-1).tolist()
    heads = DecodingHeads(runner, weight, last_token_scale=SCALE)
    # In another order than the forward's.
    order = np.array([5, 1, 3], dtype=np.int32)
    found = heads.logits(order, np.array([last[2], last[0], last[1]], np.int32))
    return found[[1, 2, 0]], last


@pytest.mark.parametrize("kind", ["lean", "hf"])
@pytest.mark.parametrize("name", ["llama_bias", "qwen3"])
def test_heads_equal_the_reference_from_transformers(name: str, kind: str) -> None:
    model = sharp(name)
    plain = copy.deepcopy(model)
    runner: ModelRunner = (
        LlamaRunner(load_llama_weights(model), 64) if kind == "lean" else HFRunner(model, 64)
    )
    weight = head_weights(model.config.hidden_size)
    found, last = evaluate(runner, weight)
    for logits, tokens, token in zip(found, prompts(runner.shape.vocab_size), last, strict=True):
        torch.testing.assert_close(logits, reference(plain, tokens, token, weight), atol=1e-4, rtol=1e-4)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    runner = LlamaRunner(load_llama_weights(sharp("llama_bias")), 64)
    weight = head_weights(runner.hidden_scale.shape[0])
    together, last = evaluate(runner, weight)
    heads = DecodingHeads(runner, weight, last_token_scale=SCALE)
    for i, row in enumerate((1, 3, 5)):
        alone = heads.logits(np.array([row], np.int32), np.array([last[i]], np.int32))
        torch.testing.assert_close(alone[0], together[i], atol=1e-5, rtol=1e-5)


def write_heads(directory: Path, target: Path, width: int, vocab_size: int) -> Path:
    described = HeadsDescription(
        kind=KIND,
        num_heads=NUM_HEADS,
        hidden_size=width,
        vocab_size=vocab_size,
        last_token_scale=SCALE,
        target="tiny",
        target_sha256=weights_digest(target),
    )
    save_heads(directory, described, list(head_weights(width)))
    return directory


def test_heads_survive_being_written_and_refuse_another_target(tmp_path: Path) -> None:
    target = tiny_models.write("llama_bias", tmp_path / "target")
    runner = load_runner(target, num_slots=64)
    width = len(runner.hidden_scale)  # type: ignore[attr-defined]
    directory = write_heads(tmp_path / "heads", Path(target), width, runner.shape.vocab_size)
    evaluate(runner, head_weights(width))
    last = np.array([3, 4], np.int32)
    rows = np.array([0, 1], np.int32)
    loaded = load_heads(directory, runner, Path(target))
    expected = DecodingHeads(runner, head_weights(width).half().float(), last_token_scale=SCALE)
    torch.testing.assert_close(loaded.logits(rows, last), expected.logits(rows, last))
    other = tiny_models.write("llama_odd", tmp_path / "other")
    with pytest.raises(UnsuitableHeads, match=r"trained for tiny .* other weights"):
        load_heads(directory, runner, Path(other))
    with pytest.raises(UnsuitableHeads, match=r"no decoding heads .* of kind None, and only those made by"):
        load_heads(Path(target), runner, Path(target))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            {"medusa_num_heads": 5, "medusa_num_layers": 1},
            "is of Medusa's repository, and only those made by",
        ),
        ([], "is of kind None"),
        ({"kind": "medusa_heads"}, "missing required field `num_heads`"),
    ],
)
def test_other_heads_are_refused(config: object, told: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsuitableHeads, match=told):
        read_description(tmp_path)


def test_heads_of_another_width_or_behind_another_runner_are_refused() -> None:
    runner = LlamaRunner(load_llama_weights(sharp("llama_bias")), 64)
    with pytest.raises(UnsuitableHeads, match="heads of width 12"):
        DecodingHeads(runner, head_weights(12))

    class Opaque:
        shape, num_slots, forward = runner.shape, 64, runner.forward

    with pytest.raises(UnsuitableHeads, match="Opaque does not show"):
        DecodingHeads(Opaque(), head_weights(12))  # type: ignore[arg-type]


def seen_by_heads(
    directory: str, kind: RunnerKind, tensor_parallel: tuple[int, int] | None = None
) -> list[np.ndarray]:
    """What heads make of the hidden states, and those that EAGLE reads."""
    runner = load_runner(
        directory,
        num_slots=64,
        runner=kind,
        tensor_parallel=tensor_parallel,
        self_test=False,
        feature_layers=(0, 1),
    )
    assert isinstance(runner, FeatureRunner)
    logits, _ = evaluate(runner, head_weights(len(runner.hidden_scale)))
    return [logits.numpy(), runner.features(np.arange(sum(LENGTHS), dtype=np.int32)).numpy()]
