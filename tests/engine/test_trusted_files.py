"""Directories with pickles or code of their own are refused, and nothing in them has run by then."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

from cluster.config import FlotillaConfig
from deployments import preflight
from deployments.demo import demo_config
from deployments.preflight import StartError
from deployments.text_codec import TextCodec
from engine.loading import UnsupportedModel, load_runner
from engine.trusted_files import REFUSED_SUFFIXES, UntrustedModel, check_files
from tests.engine import tiny_models
from tests.fakes.tiny_tokenizer import tokenizer


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, sign: Path) -> None:
        self._sign = sign

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.mkdir, (str(self._sign), 0o700)


CODE = """
import os
os.mkdir({sign!r})
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def pickled(directory: Path, suffix: str, sign: Path) -> Path:
    """A model of which only a pickle is there."""
    (directory / "model.safetensors").unlink()
    path = directory / f"pytorch_model{suffix}"
    path.write_bytes(pickle.dumps(Trap(sign)))
    return path


def with_code(directory: Path, sign: Path, model_type: str = "own_llama") -> None:
    """The model now says that it needs code of its own."""
    (directory / "own.py").write_text(CODE.format(sign=str(sign)))
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "model_type": model_type,
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }
    (directory / "config.json").write_text(json.dumps(config))


def served(path: Path, **fields: object) -> FlotillaConfig:
    raw = demo_config().model_dump()
    raw["http"]["port"], raw["drafters"] = 0, ()
    raw["target"] |= {"path": str(path), "heads": None, **fields}
    return FlotillaConfig.model_validate(raw)


@pytest.mark.parametrize("suffix", [".bin", ".pt"])
def test_pickled_weights_are_refused_by_name_and_not_opened(suffix: str, tmp_path: Path) -> None:
    sign = tmp_path / "was_here"
    directory = tiny_models.write("llama", tmp_path / "model")
    path = pickled(directory, suffix, sign)
    with pytest.raises(
        UnsupportedModel, match=rf"{path.name} is not loaded: only safetensors.*save_pretrained"
    ):
        load_runner(directory, num_slots=64)
    with pytest.raises(StartError, match=path.name):
        preflight.check(served(directory))
    with pytest.raises(StartError, match=path.name):
        preflight.check(served(directory, trust_remote_code=True))
    assert not sign.exists()
    pickle.loads(path.read_bytes())
    assert sign.exists(), "the trap does not work"


def test_a_pickle_beside_safetensors_is_left_alone(tmp_path: Path) -> None:
    directory = tiny_models.write("llama", tmp_path / "model")
    sign = tmp_path / "was_here"
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(sign)))
    load_runner(directory, num_slots=64, self_test=False)
    assert not sign.exists()


@pytest.mark.parametrize("suffix", REFUSED_SUFFIXES)
def test_every_other_format_is_refused(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"weights{suffix}").write_bytes(b"")
    with pytest.raises(UntrustedModel, match=f"weights{suffix}"):
        check_files(tmp_path)


def test_what_is_told_of_gguf_converts_it(tmp_path: Path) -> None:
    """It was what converts pickles, which finds nothing in a directory with this file alone."""
    (tmp_path / "model-q4.gguf").write_bytes(b"")
    told = r'safetensors weights are\. .*gguf_file="model-q4\.gguf", quantization_config=GgufConfig\('
    with pytest.raises(UntrustedModel, match=told):
        check_files(tmp_path)


def test_code_of_a_model_runs_only_where_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sign = tmp_path / "was_here"
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    directory = tiny_models.write("llama", tmp_path / "model")
    with_code(directory, sign)
    with pytest.raises(UnsupportedModel, match=r"config\.json names Python code.*trust_remote_code: true"):
        load_runner(directory, num_slots=64)
    with pytest.raises(StartError, match="trust_remote_code"):
        preflight.check(served(directory))
    assert not sign.exists()
    assert preflight.check(served(directory, trust_remote_code=True)) == []
    load_runner(directory, num_slots=64, runner="hf", self_test=False, trust_remote_code=True)
    assert sign.exists(), "the code would not have run anyway"


def test_code_of_a_model_that_transformers_has_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Phi-3's and DeepSeek's, which were published before."""
    sign = tmp_path / "was_here"
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    directory = tiny_models.write("llama", tmp_path / "model")
    with_code(directory, sign, model_type="llama")
    path = directory / "tokenizer_config.json"
    own = {"tokenizer_class": "LlamaTokenizerFast", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    path.write_text(json.dumps(own))
    check_files(directory)
    for runner in ("lean", "hf"):
        load_runner(directory, num_slots=64, runner=runner)
    assert not sign.exists()


def test_code_of_a_tokenizer_is_not_run(tmp_path: Path) -> None:
    sign = tmp_path / "was_here"
    tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    (tmp_path / "own.py").write_text(CODE.format(sign=str(sign)))
    with pytest.raises(UntrustedModel, match=r"tokenizer_config\.json names Python code"):
        check_files(tmp_path)
    with pytest.raises(ValueError, match="trust_remote_code"):
        TextCodec.load(tmp_path)
    assert not sign.exists()
