"""A byte-level tokenizer made in a moment, with merges that split multi-byte characters."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from deployments.text_codec import TextCodec

TEXTS = [
    "the quick brown fox jumps over the lazy dog, and the dog does not mind",
    "def add(a, b):\n    return a + b\n\n\ndef main():\n    print(add(1, 2))\n",
    "naïve café, smörgåsbord, 日本語のテキスト, emoji 🙂🚀👩‍👩‍👧, und so weiter",
] * 3

#: What the stand-in cell answers unless told otherwise.
ANSWER = "the café 🙂 answers: def add(a, b):\n    return a + b"

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('System message must come first') }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def tokenizer() -> Any:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    core.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    core.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 1)])
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|bos|>", eos_token="<|end|>", pad_token="<|pad|>"
    )
    fast.add_special_tokens({"additional_special_tokens": special[3:]})
    fast.chat_template = CHAT_TEMPLATE
    return fast


@cache
def codec() -> TextCodec:
    return TextCodec(tokenizer())


def ids(text: str) -> list[int]:
    """Tokens of a text, without anything added."""
    return codec().encode(text, add_special_tokens=False)
