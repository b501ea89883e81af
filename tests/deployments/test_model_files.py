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

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"


def weights(directory: Path, kind: str, *names: str) -> None:
    """A safetensors file with tensors of bytes of that kind, but of floats for scales, by these names."""
    named = {}
    for i, name in enumerate(names or ("a.weight",)):
        about = {"dtype": "F32", "shape": [1]} if "scale" in name else {"dtype": kind, "shape": [4]}
        named[name] = {**about, "data_offsets": [4 * i, 4 * i + 4]}
    header = json.dumps(named).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(4 * len(named))
    (directory / "model.safetensors").write_bytes(content)


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
    ("method", "kind", "names", "refused"),
    [
        ("bitsandbytes", "I8", (), True),
        ("compressed-tensors", "I8", (), True),
        ("hqq", "U8", ("a.W_q",), True),
        ("compressed-tensors", "F8_E4M3", (), True),
        ("compressed-tensors", "F8_E4M3", ("a.weight", "a.weight_scale"), False),  # what tensors are decides
        ("compressed-tensors", "I8", ("a.weight", "a.weight_scale"), False),
        ("compressed-tensors", "U8", ("a.weight_packed", "a.weight_scale"), True),  # of floats
        ("compressed-tensors", "I8", ("a.weight_packed", "a.weight_scale"), False),
        ("gptq", "U8", ("a.qweight",), True),
        ("gptq", "U8", ("a.qweight", "a.scales"), False),
        ("fp8", "I8", (), False),  # Transformers runs it on some devices
        (None, "I8", (), True),
    ],
)
def test_formats_that_run_nowhere_are_refused_at_once(
    model: Path, method: str | None, kind: str, names: tuple[str, ...], refused: bool
) -> None:
    weights(model, kind, *names)
    config = json.loads((model / "config.json").read_text())
    if method is not None:
        config["quantization_config"] = {"quant_method": method}
    (model / "config.json").write_text(json.dumps(config))
    if not refused:
        check(model)
        return
    quantized = f"its weights are quantized by `{method}`, .*"
    if method is None:
        quantized = r"it has quantized weights, which its config\.json does not describe, .*"
    told = f"model: {quantized}use the checkpoint without quantization"
    with pytest.raises(preflight.StartError, match=told):
        check(model)
    with pytest.raises(preflight.StartError, match=told):
        check(weights_dir(TARGET), drafter=model)


def test_what_cannot_be_read_is_left_to_who_loads_it(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    for described in ("awq", None, {}):
        (model / "config.json").write_text(json.dumps({**config, "quantization_config": described}))
        check(model)


@pytest.mark.parametrize("of_drafter", [False, True])
@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("config.json", '{"model_type": "llama",', r"config\.json is no JSON .*cut off"),
        ("generation_config.json", '{"temperature": 0.6,', r"generation_config\.json is no JSON"),
        ("generation_config.json", "[]", r"generation_config\.json holds no JSON object, but a list"),
        ("tokenizer_config.json", '{"tokenizer_class":', r"tokenizer_config\.json is no JSON"),
        ("tokenizer.json", '{"model": {"vocab"', r"tokenizer\.json is no JSON"),
        ("tokenizer.json", POINTER, r"tokenizer\.json is a Git LFS pointer: run `git lfs pull` in .*/model"),
        ("model.safetensors", POINTER, r"model\.safetensors is a Git LFS pointer: run `git lfs pull`"),
        ("model.safetensors", "cut off", r"model\.safetensors \(7 bytes\) has no safetensors header"),
    ],
)
def test_files_that_are_not_whole_are_named(
    model: Path, file: str, content: str, told: str, of_drafter: bool
) -> None:
    (model / file).write_text(content)
    with pytest.raises(preflight.StartError, match=told):
        check(weights_dir(TARGET), drafter=model) if of_drafter else check(model)


@pytest.mark.parametrize("tokens", ['["a"]', "[2, null, [3]]", '"</s>"'])
def test_end_tokens_that_are_no_numbers_are_refused(tokens: str, model: Path) -> None:
    (model / "generation_config.json").write_text(f'{{"eos_token_id": {tokens}}}')
    with pytest.raises(
        preflight.StartError, match=r"`eos_token_id` in .*generation_config\.json is .*number"
    ):
        check(model)


def test_a_byte_order_mark_is_told(model: Path) -> None:
    text = (model / "config.json").read_text()
    (model / "config.json").write_text(text, encoding="utf-8-sig")
    with pytest.raises(preflight.StartError, match=r"config\.json begins with a byte order mark"):
        check(model)


def test_a_pointer_in_the_place_of_the_only_vocabulary_is_refused(model: Path) -> None:
    (model / "tokenizer.model").write_text(POINTER)
    check(model)  # nobody reads it beside tokenizer.json
    (model / "tokenizer.json").unlink()
    with pytest.raises(preflight.StartError, match=r"tokenizer\.model is a Git LFS pointer"):
        check(model)


BROKEN = "{% for m in messages %}\n{{ m.content "


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.jinja", BROKEN),
        ("additional_chat_templates/tool_use.jinja", BROKEN),
        ("tokenizer_config.json", json.dumps({"chat_template": [{"name": "rag", "template": BROKEN}]})),
        ("tokenizer_config.json", json.dumps({"chat_template": BROKEN})),
    ],
)
def test_a_chat_template_that_is_no_jinja_is_named(model: Path, file: str, content: str) -> None:
    (model / file).parent.mkdir(exist_ok=True)
    (model / file).write_text(content)
    with pytest.raises(
        preflight.StartError, match=rf"chat template in .*/{file} is no Jinja: .*line 2 of it"
    ):
        check(model)
    check(weights_dir(TARGET), drafter=model)  # it renders none


def test_a_chat_template_that_no_tokenizer_reads_is_left_alone(model: Path) -> None:
    """Transformers' processors have a file of their own."""
    (model / "chat_template.json").write_text(json.dumps({"chat_template": BROKEN}))
    check(model)


def test_what_templates_of_transformers_may_say_is_no_mistake(model: Path) -> None:
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}{% endfor %}{{ strftime_now('%d') }}"
    )
    check(model)


def test_looking_needs_no_torch() -> None:
    code = (
        "import sys; from deployments import preflight; from deployments.demo import demo_config;"
        "preflight.check(demo_config(), listens=False);"
        "print([name for name in ('ray', 'torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
