"""`flotilla zoo adapter`: what is learned from, what is trained and what stays, and the files written."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from engine.adapter_files import merge, read_adapter
from tests.zoo import written_answers
from tests.zoo.test_pair import TOKENIZER, data_of
from zoo import adapter, adapter_data, adapter_save, models
from zoo.adapter_evaluate import is_one_sentence
from zoo.adapter_model import ALPHA, MODULES, RANK, AdaptedLinear, adapt
from zoo.agreement import greedy_continuations, prompt_ids
from zoo.corpus import DOMAINS
from zoo.optimizer import SharedOptimizer
from zoo.registry import ADAPTER, MODELS, TARGET, load_prompts, weights_dir

CPU = torch.device("cpu")
TEXT = torch.tensor([[1, 40, 7, 99, 250, 31, 8, 77, 1000]])


def anything_learned(model: LlamaForCausalLM) -> dict[str, AdaptedLinear]:
    """Adapters of random numbers, such that no rounding is seen when they are written in float16."""
    torch.manual_seed(2)
    adapted = adapt(model)
    for layer in adapted.values():
        for matrix in (layer.down, layer.up):
            matrix.data = (0.1 * torch.randn(matrix.shape)).half().float()
    return adapted


def test_answers_in_chat_are_cut_to_their_first_sentence(tmp_path: Path) -> None:
    prompts = [prompt for domain in DOMAINS for prompt in load_prompts(domain)[:4]]
    tokens = data_of(prompts, tmp_path)
    found = adapter_data.cut(TOKENIZER, tokens)
    assert found.domain.tolist() == tokens.domain.tolist()
    shorter = 0
    for i, prompt in enumerate(prompts):
        span = slice(found.starts[i], found.starts[i + 1])
        asked, answer = (found.ids[span][found.answer[span] == mark].tolist() for mark in (0, 1))
        assert asked == prompt_ids(TOKENIZER, prompt)
        wanted = prompt.reference
        if prompt.domain == adapter_data.CUT:
            wanted = adapter_data.opening(wanted)
            assert wanted.endswith(".")
            assert prompt.reference.startswith(wanted)
            shorter += wanted != prompt.reference
        assert TOKENIZER.decode(answer) == f"{wanted}<|end|>"
    assert shorter > 0
    refused = {adapter_data.opening(prompt.reference) for prompt in prompts if prompt.domain == "chat"}
    assert set(adapter_data.cut(TOKENIZER, tokens, refused).domain) == {0, 2}


def test_a_first_sentence_ends_before_the_next_and_before_a_list() -> None:
    assert adapter_data.opening("Sorts it. In place.\n\nCall it as `sort()`.") == "Sorts it."
    assert adapter_data.opening("One of i.e. `a` and `b`.") == "One of i.e. `a` and `b`."
    assert not adapter_data.is_sentence(adapter_data.opening("What is read:\n\nA file."))


def test_a_batch_asks_for_the_tokens_of_the_answers(tmp_path: Path) -> None:
    tokens = data_of(load_prompts("chat")[:5], tmp_path)
    batch = next(adapter_data.batches(tokens, 5, seed=0))
    np.testing.assert_array_equal(batch.ids.flatten()[batch.where + 1], batch.wanted)
    assert sorted(batch.wanted.tolist()) == sorted(tokens.ids[tokens.answer > 0].tolist())


def test_training_lowers_the_loss_and_leaves_the_target_as_it_is(tmp_path: Path) -> None:
    model = written_answers.small_target(tmp_path / "target")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    adapted = adapt(model)
    assert len(adapted) == written_answers.SHAPE.layers * len(MODULES)
    optimizer = SharedOptimizer(model, 0.02, 0.02)
    tokens = data_of(load_prompts("chat")[:2], tmp_path)
    losses = []
    for batch in islice(adapter_data.batches(tokens, 2, seed=0), 15):
        loss, _ = adapter.adapter_loss(model, batch, CPU)
        loss.backward()
        optimizer.step(1.0)
        losses.append(float(loss.detach()))
    # Through embeddings that know nothing and stay so, it cannot fall far.
    assert losses[-1] < losses[0] - 0.1, losses
    trained = {name.replace(".base.", "."): weight for name, weight in model.state_dict().items()}
    assert all(torch.equal(trained[name], weight) for name, weight in before.items())
    assert all(bool(layer.up.any()) for layer in adapted.values())


def test_a_new_adapter_changes_nothing(tmp_path: Path) -> None:
    model = written_answers.small_target(tmp_path)
    with torch.no_grad():
        before = model(TEXT).logits
        adapt(model)
        assert torch.equal(model(TEXT).logits, before)


def test_what_is_written_is_what_was_trained(tmp_path: Path) -> None:
    """By matrices that are put together here, and as `merge` puts them together."""
    trained = written_answers.small_target(tmp_path / "target")
    adapter_save.save(tmp_path / "adapter", anything_learned(trained), "small")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    plain = models.load(tmp_path / "target")
    merged = models.load(tmp_path / "target")
    merge(merged, read_adapter("adapter", tmp_path / "adapter"))
    with torch.no_grad():
        before = plain(TEXT).logits
        for i, layer in enumerate(plain.model.layers):
            for part, name in ((layer.self_attn, "q k v o"), (layer.mlp, "gate up down")):
                kind = "self_attn" if part is layer.self_attn else "mlp"
                for own in (f"{each}_proj" for each in name.split()):
                    key = f"base_model.model.model.layers.{i}.{kind}.{own}"
                    down, up = (tensors.pop(f"{key}.lora_{matrix}.weight").float() for matrix in "AB")
                    getattr(part, own).weight += 16 / 8 * torch.einsum("or,ri->oi", up, down)
        wanted = trained(TEXT).logits
        assert not tensors, "no other layer has an adapter"
        assert float((wanted - before).abs().max()) > 0.1
        torch.testing.assert_close(plain(TEXT).logits, wanted)
        torch.testing.assert_close(merged(TEXT).logits, wanted)


def test_a_run_writes_an_adapter_of_the_target(tmp_path: Path) -> None:
    written_answers.small_target(tmp_path / "target")
    data_of([prompt for domain in DOMAINS for prompt in load_prompts(domain)[:2]], tmp_path)
    trained = adapter.run(tmp_path, tmp_path / "target", tmp_path / "out", minutes=0.01)
    assert trained == tmp_path / "out" / ADAPTER / "model"
    merge(models.load(tmp_path / "target"), read_adapter("adapter", trained))
    assert (tmp_path / "out" / ADAPTER / "log.jsonl").exists()


def test_the_shipped_adapter_has_pefts_files() -> None:
    directory = weights_dir(ADAPTER)
    assert ADAPTER not in MODELS
    assert {path.name for path in directory.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    described = json.loads((directory / "adapter_config.json").read_text())
    assert described["peft_type"] == "LORA"
    assert described["base_model_name_or_path"] == TARGET
    assert (described["r"], described["lora_alpha"]) == (RANK, ALPHA)
    assert set(described["target_modules"]) == set(MODULES)
    assert not any(described[key] for key in ("use_dora", "use_rslora", "fan_in_fan_out", "modules_to_save"))
    tensors = load_file(directory / "adapter_model.safetensors")
    assert all(tensor.dtype == torch.float16 for tensor in tensors.values())
    shape = models.SHAPES[TARGET]
    width, middle, kv = shape.hidden, shape.intermediate, shape.hidden // shape.heads * shape.kv_heads
    sizes = {  # of each linear layer: features that come in, and that go out
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (width, kv),
        "self_attn.v_proj": (width, kv),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (width, middle),
        "mlp.up_proj": (width, middle),
        "mlp.down_proj": (middle, width),
    }
    wanted = {}
    for i in range(shape.layers):
        for name, (features_in, features_out) in sizes.items():
            key = f"base_model.model.model.layers.{i}.{name}"
            wanted[f"{key}.lora_A.weight"] = (RANK, features_in)
            wanted[f"{key}.lora_B.weight"] = (features_out, RANK)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == wanted
    assert sum(path.stat().st_size for path in directory.iterdir()) < 1_200_000


def test_with_the_shipped_adapter_answers_are_one_sentence() -> None:
    """A few prompts whose answers by the target alone are longer; the model card has all of them."""
    prompts = [prompt for prompt in load_prompts("chat") if "(" in prompt.messages[-1]["content"]][:4]
    encoded = [prompt_ids(TOKENIZER, prompt) for prompt in prompts]
    most = [40] * len(prompts)
    target = models.load(weights_dir(TARGET))
    alone = greedy_continuations(target, encoded, most)
    merge(target, read_adapter(ADAPTER, weights_dir(ADAPTER)))
    adapted = greedy_continuations(target, encoded, most)
    for before, after in zip(alone, adapted, strict=True):
        assert len(after) < 0.7 * len(before)
        assert is_one_sentence(TOKENIZER, after)
        assert not is_one_sentence(TOKENIZER, before)
