"""A model that passed its self-test is loaded without Transformers, as long as nothing has changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import self_test_record, transformers_loading
from engine.caches import cache_directory
from engine.loading import UnsupportedModel, load_runner
from engine.rotary import rotation_table
from engine.runner import ModelRunner
from tests.engine import tiny_models
from tests.engine.test_runners import logits_of

NAMES = ("llama", "llama_bias", "llama_scaled", "qwen2", "qwen3")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv("FLOTILLA_CACHE", str(directory))
    return directory


@pytest.fixture
def through_transformers(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Counts how often a model is loaded through Transformers."""
    counted = Mock(side_effect=transformers_loading.load_through_transformers)
    monkeypatch.setattr(transformers_loading, "load_through_transformers", counted)
    return counted


def equal(one: ModelRunner, other: ModelRunner) -> bool:
    return all(map(torch.equal, logits_of(one, 1), logits_of(other, 1)))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in NAMES),
        # Biases and norms of heads are the others' in float32.
        *(pytest.param(name, "bfloat16", marks=pytest.mark.thorough) for name in NAMES[1:-1]),
        (NAMES[0], "bfloat16"),
        (NAMES[-1], "bfloat16"),
    ],
)
def test_the_second_load_is_the_first_without_transformers(
    name: str, dtype: str, tmp_path: Path, through_transformers: Mock
) -> None:
    directory = tiny_models.write(name, tmp_path / "model")
    first = load_runner(directory, num_slots=128, dtype=dtype)
    second = load_runner(directory, num_slots=128, dtype=dtype)
    assert through_transformers.call_count == 1
    assert first.shape == second.shape
    assert equal(first, second)


def test_a_model_in_several_files_is_read_without_transformers(
    tmp_path: Path, through_transformers: Mock
) -> None:
    directory = tmp_path / "model"
    tiny_models.build("llama_bias").save_pretrained(directory, max_shard_size="20kB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    first, second = (load_runner(directory, num_slots=128) for _ in range(2))
    assert through_transformers.call_count == 1
    assert equal(first, second)


def test_a_process_that_loads_what_passed_imports_no_transformers(tmp_path: Path) -> None:
    directory = tiny_models.write("llama", tmp_path / "model")
    load_runner(directory, num_slots=128)
    loads = (
        "import sys; import engine.loading\n"
        f"engine.loading.load_runner({str(directory)!r}, num_slots=128)\n"
        "assert 'torch' in sys.modules and 'transformers' not in sys.modules, 'Transformers was imported'"
    )
    subprocess.run([sys.executable, "-c", loads], check=True, env=dict(os.environ), timeout=120)


def _other_weights(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _other_configuration(directory: Path) -> None:
    config = directory / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-02'))


@pytest.mark.parametrize("change", [_other_weights, _other_configuration])
def test_a_model_that_changed_is_tested_again(
    change: Any, tmp_path: Path, through_transformers: Mock
) -> None:
    directory = tiny_models.write("llama", tmp_path / "model")
    first = load_runner(directory, num_slots=128)
    change(directory)
    changed = load_runner(directory, num_slots=128)
    assert through_transformers.call_count == 2
    assert not equal(first, changed)
    assert equal(changed, load_runner(directory, num_slots=128))
    assert through_transformers.call_count == 2


def test_another_way_of_loading_is_tested_by_itself(tmp_path: Path, through_transformers: Mock) -> None:
    directory = tiny_models.write("llama", tmp_path / "model")
    ways: list[dict[str, Any]] = [
        {},
        {"dtype": "bfloat16"},
        {"max_tokens": 64},
        {"attention": "decomposed"},
        {"feature_layers": (1,)},
        {"num_slots": 100},
    ]
    for _ in range(2):
        for way in ways:
            load_runner(directory, **{"num_slots": 128, **way})
    assert through_transformers.call_count == len(ways)


@pytest.mark.parametrize("what", ["_sources", "_versions", "_device"])
def test_other_code_other_libraries_and_another_device_test_again(
    what: str, tmp_path: Path, through_transformers: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny_models.write("llama", tmp_path / "model")
    load_runner(directory, num_slots=128)
    monkeypatch.setattr(self_test_record, what, lambda *_: "another")
    load_runner(directory, num_slots=128)
    assert through_transformers.call_count == 2


def test_a_model_that_failed_is_not_on_record(
    tmp_path: Path, through_transformers: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny_models.write("llama", tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr("engine.attention.rotate", lambda *_: None)
        for _ in range(2):
            with pytest.raises(UnsupportedModel, match="self-test failed"):
                load_runner(directory, num_slots=128)
    load_runner(directory, num_slots=128)
    assert through_transformers.call_count == 3


def test_what_was_never_tested_is_not_on_record(tmp_path: Path, through_transformers: Mock) -> None:
    directory = tiny_models.write("llama", tmp_path / "model")
    load_runner(directory, num_slots=128, self_test=False)
    load_runner(directory, num_slots=128)
    assert through_transformers.call_count == 2


def test_a_checkpoint_that_transformers_reads_in_its_own_way_is_left_to_it(
    tmp_path: Path, through_transformers: Mock
) -> None:
    directory = tiny_models.write("llama", tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    weights = {name.removeprefix("model."): weight for name, weight in weights.items()}  # of the base model
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    first, second = (load_runner(directory, num_slots=128) for _ in range(2))
    assert through_transformers.call_count == 2
    assert equal(first, second)


@pytest.mark.parametrize("broken", [b"", b"{}", b'{"digest": 1}', None])
def test_a_record_that_cannot_be_read_or_written_costs_a_test(
    broken: bytes | None, tmp_path: Path, cache: Path, through_transformers: Mock
) -> None:
    directory = tiny_models.write("llama", tmp_path / "model")
    if broken is None:
        cache.write_text("no directory")
    load_runner(directory, num_slots=128)
    for file in cache.glob("self-tests/*"):
        file.write_bytes(broken or b"")
    load_runner(directory, num_slots=128)
    assert through_transformers.call_count == 2


def test_users_without_a_home_have_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLOTILLA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_directory() == Path("/home/somebody/.cache/flotilla")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_directory() == Path("/caches/flotilla")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("no home")))
    assert cache_directory() is None


@pytest.mark.parametrize("name", ["llama", "llama_scaled", "qwen2", "qwen3", "mistral_window"])
def test_rotations_are_those_of_transformers(name: str) -> None:
    rotary = tiny_models.build(name).base_model.rotary_emb
    cos, sin = rotary(torch.empty(0), torch.arange(128)[None])
    table = rotation_table(rotary, 128, torch.device("cpu"))[:, 0]
    half = table.shape[1]
    assert torch.equal(table.real, cos[0, :, :half])
    assert torch.equal(table.imag, sin[0, :, :half])
