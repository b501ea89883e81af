"""What is tokenized is what a model's `tokenizer.json` says, whatever class its configuration names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors, trainers
from tokenizers import pre_tokenizers as splits

from deployments.text_codec import TextCodec
from tests.drafters.tokenizers_of_all_kinds import TEXTS, byte_fallback

END, BEGIN, ADDED, PLAIN = "<|endoftext|>", "<|begin|>", "<|added|>", "<br>"
ROWS = "rows = [\n    12,\n        34,\n    2024,\n  7,  8]\n" * 50 + " ".join(map(str, range(1000, 1400)))
#: As Llama 3 and Qwen 2 split texts, but that Qwen has `\\p{N}` for `\\p{N}{1,3}`.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Shape:
    """How a published tokenizer is made.

    Attributes:
        class_name: that its configuration has for it.
        model_type: of its model.
        core: what its `tokenizer.json` says.
        settings: others of the configuration.
    """

    class_name: str | None
    model_type: str
    core: Callable[[], Tokenizer]
    settings: dict[str, Any]


def byte_level(pre_tokenizer: Any, normalizer: Any = None, *, begins: bool = False) -> Tokenizer:
    core = Tokenizer(models.BPE())
    if normalizer is not None:
        core.normalizer = normalizer
    core.pre_tokenizer = pre_tokenizer
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[END, BEGIN],
        initial_alphabet=splits.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([*TEXTS, ROWS], trainer)
    core.add_tokens([PLAIN])
    if begins:
        core.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 1)])
    return core


def split(pattern: str) -> Any:
    parts = [splits.Split(Regex(pattern), "isolated"), splits.ByteLevel(False, use_regex=False)]
    return splits.Sequence(parts)


def llama_2() -> Tokenizer:
    with TemporaryDirectory() as directory:
        core = Tokenizer.from_file(str(byte_fallback(Path(directory)) / "tokenizer.json"))
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return core


def gemma() -> Tokenizer:
    core = llama_2()
    core.normalizer = normalizers.Replace(" ", "\u2581")
    core.pre_tokenizer = splits.Split(" ", "merged_with_previous")
    return core


def mistral() -> Tokenizer:
    core = llama_2()
    core.normalizer = normalizers.Sequence([])
    core.pre_tokenizer = splits.Metaspace(prepend_scheme="first", split=False)
    return core


DIGITS = splits.Sequence([splits.Digits(individual_digits=True), splits.ByteLevel(False)])
GPT_2 = splits.ByteLevel(False)
ENDS = {"bos_token": END, "eos_token": END, "unk_token": END, "add_prefix_space": False}
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False}

SHAPES = {
    "SmolLM2": Shape("GPT2Tokenizer", "llama", lambda: byte_level(DIGITS), ENDS),
    "StarCoder2": Shape("GPT2Tokenizer", "starcoder2", lambda: byte_level(DIGITS), ENDS),
    "GPT-2": Shape(None, "gpt2", lambda: byte_level(GPT_2), {"model_max_length": 1024}),
    "Qwen2": Shape(
        "Qwen2Tokenizer",
        "qwen2",
        lambda: byte_level(split(WORDS.replace("{1,3}", "")), normalizers.NFC()),
        {"bos_token": None, "eos_token": END, "add_prefix_space": False},
    ),
    "Llama 3": Shape(
        "PreTrainedTokenizerFast", "llama", lambda: byte_level(split(WORDS), begins=True), {"eos_token": END}
    ),
    "Llama 3, mislabelled": Shape(
        "LlamaTokenizerFast", "llama", lambda: byte_level(split(WORDS), begins=True), ENDS
    ),
    "Llama 2": Shape("LlamaTokenizer", "llama", llama_2, ROLES | {"add_bos_token": True}),
    "Mistral": Shape("LlamaTokenizer", "mistral", mistral, ROLES),
    "Gemma": Shape("GemmaTokenizer", "gemma", gemma, ROLES),
    "OLMo": Shape("GPTNeoXTokenizer", "olmo", lambda: byte_level(GPT_2, normalizers.NFC()), ENDS),
    "one that is not GPT-2's": Shape("GPT2Tokenizer", "exaone4", lambda: byte_level(split(WORDS)), ENDS),
}


def write(directory: Path, shape: Shape, **settings: Any) -> Tokenizer:
    """A model's directory with that tokenizer; what its file says."""
    core = shape.core()
    core.save(str(directory / "tokenizer.json"))
    own = shape.settings | ({} if shape.class_name is None else {"tokenizer_class": shape.class_name})
    (directory / "tokenizer_config.json").write_text(json.dumps(own | settings))
    (directory / "config.json").write_text(json.dumps({"model_type": shape.model_type}))
    return core


@cache
def codec_and_core(name: str) -> tuple[TextCodec, Tokenizer]:
    with TemporaryDirectory() as directory:
        core = write(Path(directory), SHAPES[name])
        return TextCodec.load(Path(directory)), core


PIECES = [
    "12345", "2024", "x = 1\n\n\n", "    ", "rows\n    12", "\n        34,", "  7", PLAIN, "\t\t", "\r\n",
    "DON'T stop", "the quick", "return", "\u00a0",
    "漢字", "日本語のテキスト", "e\u0301", "🎈", "👩\u200d👩\u200d👧", "٣٤", "½", END, "</s>",
]  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
@given(text=st.lists(st.one_of(st.text(), st.sampled_from(PIECES), st.just(" "))).map("".join))
def test_tokens_are_those_of_the_file(name: str, text: str) -> None:
    codec, core = codec_and_core(name)
    for special in (False, True):
        assert (
            codec.encode(text, add_special_tokens=special)
            == core.encode(text, add_special_tokens=special).ids
        )


@pytest.mark.parametrize("name", SHAPES)
def test_what_only_the_configuration_says_holds(name: str, tmp_path: Path) -> None:
    added = {"content": ADDED, "special": True, "normalized": False, "lstrip": False, "rstrip": False}
    number = SHAPES[name].core().get_vocab_size()
    core = write(
        tmp_path,
        SHAPES[name],
        chat_template="{% for m in messages %}<|added|>{{ m.content }}{% endfor %}{{ eos_token }}",
        eos_token=ADDED,
        added_tokens_decoder={str(number): added | {"single_word": False}},
    )
    core.add_special_tokens([AddedToken(ADDED, special=True, normalized=False)])
    codec = TextCodec.load(tmp_path)
    assert codec.eos_ids == {number}
    assert codec.special_text(number) == ADDED
    expected = core.encode(f"{ADDED}12345{ADDED}", add_special_tokens=False).ids
    assert codec.encode_chat([{"role": "user", "content": "12345"}]) == expected


def test_code_that_is_not_run_changes_no_tokens(tmp_path: Path) -> None:
    """As of models that came with code before Transformers had its own: that takes the place of theirs."""
    auto_map = {"AutoTokenizer": ["own.OwnTokenizer", None]}
    core = write(tmp_path, SHAPES["SmolLM2"], auto_map=auto_map)
    assert TextCodec.load(tmp_path).encode("x = 12345") == core.encode("x = 12345").ids
