"""The family's tokenizer: byte-level BPE of 4096 entries with a chat template.

All models share it but those of `zoo.registry.OTHER_VOCABULARY`, whose own is made in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 4096
BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, BOS, END, SYSTEM, USER, ASSISTANT)

#: Each message is its role's token, its text and the end token; the answer follows the assistant's token.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('Unknown role: ' + message['role']) }}"
    "{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train(
    texts: Iterable[str], max_length: int = 1024, vocabulary: int = VOCABULARY
) -> PreTrainedTokenizerFast:
    """Learn the merges from ``texts``; raw text is encoded with the beginning token in front of it.

    The GPT-2 pattern keeps a run of white space but its last character apart from the word after it, so
    that a line break with its indentation becomes one token and the word behind keeps its leading space.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    core.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, core.token_to_id(BOS))]),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [SYSTEM, USER, ASSISTANT]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def load(directory: Path) -> PreTrainedTokenizerFast:
    """The tokenizer saved in ``directory``."""
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(str(directory))
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer
