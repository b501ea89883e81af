"""The tokenizer: lossless on any text, the chat template as trained."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.examples import examples
from zoo.corpus import Example
from zoo.dataset import encode, prompt_text
from zoo.registry import MODELS, TARGET, weights_dir
from zoo.tokenizer import BOS, SPECIAL_TOKENS, VOCABULARY, load

TOKENIZER = load(weights_dir(TARGET))


@examples(100)
@given(st.text(max_size=200))
def test_any_text_survives(text: str) -> None:
    if any(token in text for token in SPECIAL_TOKENS):
        return
    ids = TOKENIZER(text)["input_ids"]
    assert ids[0] == TOKENIZER.bos_token_id
    assert max(ids) < VOCABULARY
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    "text", ["\x00\x7f\xff", "naïve ☃ 漢字 🎈", "\n\n\t  x\r\n", "def f():\n    return 1\n"]
)
def test_odd_text_survives(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"], skip_special_tokens=True) == text


def test_chat_template_renders_what_was_trained() -> None:
    messages = (("system", "Be brief."), ("user", "What does `f` do?"))
    example = Example("chat", "m", "Nothing.", messages=messages)
    rendered = TOKENIZER.apply_chat_template(example.chat(), add_generation_prompt=True, tokenize=False)
    assert rendered == prompt_text(example)
    assert rendered == f"{BOS}<|system|>Be brief.<|end|><|user|>What does `f` do?<|end|><|assistant|>"
    ids = TOKENIZER.apply_chat_template(example.chat(), add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    trained = encode(TOKENIZER, [example])
    prompt = trained.ids[trained.answer == 0].tolist()
    assert ids == prompt
    assert trained.ids[-1] == TOKENIZER.eos_token_id


def test_unknown_roles_are_refused() -> None:
    with pytest.raises(Exception, match="Unknown role"):
        TOKENIZER.apply_chat_template([{"role": "wizard", "content": "x"}], tokenize=False)


@pytest.mark.parametrize("name", MODELS)
def test_all_models_share_it(name: str) -> None:
    other = AutoTokenizer.from_pretrained(str(weights_dir(name)))
    assert isinstance(other, PreTrainedTokenizerFast)
    assert other.get_vocab() == TOKENIZER.get_vocab()
    assert other.chat_template == TOKENIZER.chat_template
    assert (other.pad_token_id, other.bos_token_id, other.eos_token_id) == (0, 1, 2)
