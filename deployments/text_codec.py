"""A model's tokenizer as the API needs it: prompts and chats to tokens, tokens to text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deployments.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer, byte_table
from deployments.errors import bad_request

#: The class that is nothing but `tokenizer.json`, by its name in Transformers 4 and in 5.
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


class TextCodec:
    """Encodes prompts, renders chats, decodes outputs.

    Attributes:
        eos_ids: tokens that end an answer, of the tokenizer and of `generation_config.json`.
    """

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        own = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        self.eos_ids = eos_ids | frozenset(own)
        self._special = frozenset(int(token) for token in tokenizer.all_special_ids)
        self._bytes = _token_bytes(tokenizer)

    @classmethod
    def load(cls, directory: Path) -> TextCodec:
        """The tokenizer in a Hugging Face directory."""
        return cls(_load_tokenizer(directory), _generation_eos(directory))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a plain prompt."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def encode_chat(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation under the model's chat template."""
        if not self._tokenizer.chat_template:
            raise bad_request("This model has no chat template; use /v1/completions.", "messages")
        # jinja2 is loaded by Transformers only when a template is rendered.
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            raise bad_request(
                f"The model's chat template refuses these `messages`: {error}", "messages"
            ) from None
        # The template writes the special tokens itself.
        return self.encode(text, add_special_tokens=False)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """For the output of one request."""
        skipped = self._special if skip_special_tokens else frozenset[int]()
        if self._bytes is not None:
            return ByteDetokenizer(self._bytes, skipped)
        return WindowDetokenizer(lambda ids: str(self._tokenizer.decode(ids)), skipped)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens, all at once."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join(map(detokenizer.feed, ids)) + detokenizer.finish()

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for, by itself."""
        if self._bytes is not None:
            return self._bytes[token] if 0 <= token < len(self._bytes) else b""
        return str(self._tokenizer.decode([token])).encode()

    def token_text(self, token: int) -> str:
        """One token as shown in log-probabilities; invalid UTF-8 as OpenAI shows it."""
        data = self.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _load_tokenizer(directory: Path) -> Any:
    """The tokenizer, by the generic class if that is its own: AutoTokenizer loads torch, 2 s and 200 MB."""
    try:
        name = json.loads((directory / "tokenizer_config.json").read_text()).get("tokenizer_class")
    except FileNotFoundError:
        name = None
    if name in _GENERIC_CLASSES and (directory / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(directory))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(directory))


def _token_bytes(tokenizer: Any) -> list[bytes] | None:
    """The bytes of every token, if the vocabulary is byte-level."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    if decoder.get("type") != "ByteLevel":
        return None
    size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return byte_table([backend.id_to_token(token) for token in range(size)])


def _generation_eos(directory: Path) -> frozenset[int]:
    """Chat models often end a turn with another token than the tokenizer's; their generation config says."""
    try:
        config = json.loads((directory / "generation_config.json").read_text())
    except FileNotFoundError:
        return frozenset()
    eos = config.get("eos_token_id")
    return frozenset(int(token) for token in (eos if isinstance(eos, list) else [eos]) if token is not None)
