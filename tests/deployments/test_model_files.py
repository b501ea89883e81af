"""Model directories that cannot be served are refused by their files, before anything is started."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.config import FlotillaConfig
from deployments import preflight
from deployments.tokenizer_files import MissingTokenizer, check_tokenizer
from zoo.registry import TARGET, weights_dir


def weights(directory: Path, kind: str) -> None:
    """A safetensors file with one tensor of bytes of that kind."""
    header = json.dumps({"a.weight": {"dtype": kind, "shape": [4], "data_offsets": [0, 4]}}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))


def check(directory: Path, drafter: Path | None = None) -> None:
    drafters = [] if drafter is None else [{"kind": "model", "name": "d", "path": str(drafter)}]
    tree = {"target": {"path": str(directory)}, "drafters": drafters, "http": {"port": 0}}
    preflight.check(FlotillaConfig.model_validate(tree))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(weights_dir(TARGET), tmp_path / "model"))


def test_a_model_without_a_tokenizer_is_refused_with_the_files_it_lacks(model: Path) -> None:
    """Transformers said, after a minute, that SentencePiece should be installed."""
    check(model)
    (model / "tokenizer.json").unlink()
    with pytest.raises(preflight.StartError, match=r"model has no tokenizer: neither tokenizer\.json"):
        check(model)
    (model / "tokenizer_config.json").unlink()
    with pytest.raises(preflight.StartError, match="has no tokenizer"):
        check(model)


@pytest.mark.parametrize("file", ["tokenizer.json", "vocab.json", "vocab.txt"])
def test_vocabularies_have_many_names(file: str, tmp_path: Path) -> None:
    with pytest.raises(MissingTokenizer):
        check_tokenizer(tmp_path)
    check_tokenizer(tmp_path, trust_remote_code=True)
    (tmp_path / file).touch()
    check_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "package"),
    [
        ("tokenizer.model", "sentencepiece"),
        ("spiece.model", "sentencepiece"),
        ("tekken.json", "mistral-common"),
        ("qwen.tiktoken", "tiktoken"),
    ],
)
def test_a_vocabulary_that_takes_a_package_names_it(
    file: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of SentencePiece's files Transformers said, once all was loaded, that they are tiktoken's."""
    (tmp_path / file).touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingTokenizer, match=rf"{file} is not read .*`pip install {package}`"):
        check_tokenizer(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == package.replace("-", "_") or None)
    check_tokenizer(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "tokenizer.json").touch()
    check_tokenizer(tmp_path)


def test_tokenizers_of_bytes_need_no_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    check_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("method", "kind", "refused"),
    [
        ("awq", "I8", True),
        ("compressed-tensors", "I8", True),
        ("compressed-tensors", "F8_E4M3", False),  # what its tensors are decides
        ("fp8", "I8", False),  # Transformers runs it on some devices
        (None, "I8", False),
    ],
)
def test_formats_that_run_nowhere_are_refused_at_once(
    model: Path, method: str | None, kind: str, refused: bool
) -> None:
    weights(model, kind)
    config = json.loads((model / "config.json").read_text())
    if method is not None:
        config["quantization_config"] = {"quant_method": method}
    (model / "config.json").write_text(json.dumps(config))
    if not refused:
        check(model)
        return
    told = f"model: its weights are quantized by `{method}`, .*use the checkpoint without quantization"
    with pytest.raises(preflight.StartError, match=told):
        check(model)
    with pytest.raises(preflight.StartError, match=told):
        check(weights_dir(TARGET), drafter=model)


def test_what_cannot_be_read_is_left_to_who_loads_it(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    for described in ("awq", None, {}):
        (model / "config.json").write_text(json.dumps({**config, "quantization_config": described}))
        check(model)
    (model / "model.safetensors").write_bytes(b"cut off")
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    check(model)


def test_looking_needs_no_torch() -> None:
    code = (
        "import sys; from deployments import preflight; from deployments.demo import demo_config;"
        "preflight.check(demo_config(), listens=False);"
        "print([name for name in ('ray', 'torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
