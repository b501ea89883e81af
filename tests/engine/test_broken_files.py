"""Weights that are not whole are refused by their headers, before anything is loaded."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.loading import UnsupportedModel, load_runner
from engine.model_files import INDEX, BrokenFiles, check_model_files, check_ranks
from tests.engine import tiny_models
from tests.engine.test_runners import logits_of


def sharded(directory: Path) -> Path:
    tiny_models.build("llama").save_pretrained(directory, max_shard_size="20KB")
    return directory


def refused(directory: Path, told: str) -> None:
    with pytest.raises(BrokenFiles, match=told):
        check_model_files(directory)
    with pytest.raises(UnsupportedModel, match=told):
        load_runner(directory, num_slots=64)


def test_whole_ones_pass(tmp_path: Path) -> None:
    check_model_files(tiny_models.write("llama", tmp_path / "one"))
    check_model_files(sharded(tmp_path / "several"))
    save_file({"empty": torch.zeros(0, 4)}, tmp_path / "one" / "model.safetensors")
    check_model_files(tmp_path / "one")


def test_more_ranks_than_divide_the_heads_are_refused_before_anything_starts(tmp_path: Path) -> None:
    directory = tiny_models.write("llama", tmp_path)
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_attention_heads": 8, "num_key_value_heads": 2}
    for made in (config, {"text_config": config, "model_type": "llava"}):
        (directory / "config.json").write_text(json.dumps(made))
        check_ranks(directory, 1)
        check_ranks(directory, 2)
        with pytest.raises(ValueError, match="tensor_parallel is 4, and the 2 key-value heads"):
            check_ranks(directory, 4)
        with pytest.raises(ValueError, match="the 8 attention heads"):
            check_ranks(directory, 3)
    (directory / "config.json").write_text("{}")
    check_ranks(directory, 3)


@pytest.mark.parametrize("left", [0, 7, 8, 100, -1])
def test_a_file_that_is_cut_off_is_named(left: int, tmp_path: Path) -> None:
    file = tiny_models.write("llama", tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    refused(tmp_path, r"model\.safetensors.*(no safetensors header|bytes, and by its header).*cut off")


def test_a_header_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tiny_models.write("llama", tmp_path) / "model.safetensors"
    for header in (b"[]", b'{"a": {}}', b"\xff\xff", b'{"a": 1}'):
        file.write_bytes(struct.pack("<Q", len(header)) + header)
        refused(tmp_path, r"header of .*model\.safetensors is none")


def test_a_shard_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    shards = sorted(sharded(tmp_path).glob("model-*.safetensors"))
    shards[2].write_bytes(shards[2].read_bytes() + b"more")
    refused(tmp_path, rf"{shards[2].name} has \d+ bytes, and by its header")
    shards[1].unlink()
    refused(tmp_path, rf"index\.json names {len(shards)} files of weights, and 1 of them .*{shards[1].name}")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", r"index\.json is no JSON"),
        ("{}", "no `weight_map`"),
        (json.dumps({"weight_map": {"a": 1}}), "no `weight_map`"),
    ],
)
def test_an_index_that_says_nothing_is_named(content: str, told: str, tmp_path: Path) -> None:
    (sharded(tmp_path) / INDEX).write_text(content)
    refused(tmp_path, told)


def test_an_index_as_transformers_takes_none_is_told_what_it_lacks(tmp_path: Path) -> None:
    """Transformers said "KeyError: metadata"."""
    index = sharded(tmp_path) / INDEX
    described = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": described["weight_map"]}))
    refused(tmp_path, r'index\.json has no `metadata`, .*: add `"metadata": \{\}`')
    index.write_text(json.dumps({"weight_map": described["weight_map"], "metadata": {}}))
    load_runner(tmp_path, num_slots=64)


def test_an_index_may_name_what_no_file_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of old checkpoints do, whose rotary angles were tensors; Transformers passes over it."""
    monkeypatch.setenv("FLOTILLA_CACHE", str(tmp_path / "cache"))
    directory = sharded(tmp_path / "model")
    expected = logits_of(load_runner(directory, num_slots=128, runner="lean"), 1)
    index = directory / INDEX
    described = json.loads(index.read_text())
    shard = described["weight_map"]["model.norm.weight"]
    described["weight_map"]["model.layers.0.self_attn.rotary_emb.inv_freq"] = shard
    index.write_text(json.dumps(described))
    for _ in range(2):  # the second time its self-test may be on record
        found = logits_of(load_runner(directory, num_slots=128, runner="lean"), 1)
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)


def test_a_file_that_nobody_loads_may_be_anything(tmp_path: Path) -> None:
    """Adapters and the makers' own format lie beside many models."""
    tiny_models.write("llama", tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "adapter_config.json").write_text("{")
    check_model_files(tmp_path)


def test_weights_under_names_that_nobody_looks_for_are_told(tmp_path: Path) -> None:
    shards = sorted(sharded(tmp_path / "several").glob("model-*.safetensors"))
    (tmp_path / "several" / INDEX).unlink()
    refused(tmp_path / "several", rf"no weights in .*; {shards[0].name} is neither; copy all")
    one = tiny_models.write("llama", tmp_path / "one")
    (one / "model.safetensors").rename(one / "adapter_model.safetensors")
    (one / "adapter_config.json").write_text("{}")
    refused(one, r"adapter_model\.safetensors is neither\. It holds an adapter: name its model here")


def test_a_directory_in_the_place_of_a_file_is_told(tmp_path: Path) -> None:
    tiny_models.write("llama", tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").mkdir()
    refused(tmp_path, r"generation_config\.json cannot be read: Is a directory")
