"""A model's tokenizer as the API needs it: prompts and chats to tokens, tokens to text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from cluster.template_config import no_variables
from deployments.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer, byte_table
from deployments.errors import bad_request
from deployments.tokenizer_loading import load_tokenizer
from deployments.told_conversations import ways_to_tell
from engine.end_tokens import end_tokens_of_model

# Texts that no template writes by itself.
_PROBE = {"role": "user", "content": "qwhnzx"}
_CALLED = "qwhnzy"
_CALL = {
    "id": "a1B2c3D4e",  # as Mistral's demand it
    "type": "function",
    "function": {"name": "f", "arguments": {"a": _CALLED}},
}
_CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": _CALL["id"], "content": _PROBE["content"]},
]

#: How SentencePiece names the token of a byte, for characters that have none of their own.
_BYTE = re.compile("<0x([0-9A-F]{2})>")

#: Tokens of a text that is gone on with, from which the first ones of the rest get their spaces.
_CONTEXT = 6

#: Of what a tokenizer was made with, where it was found: that is nobody's business.
_PLACES = frozenset(
    ("name_or_path", "vocab_file", "merges_file", "tokenizer_file", "is_local", "local_files_only")
)

_HALF_PAIR = re.compile("[\ud800-\udfff]")


class TextCodec:
    """Encodes prompts, renders chats, decodes outputs.

    Args:
        tokenizer: as Transformers has it.
        eos_ids: tokens that end an answer, besides the tokenizer's own.
        variables: of the chat template, where a request names no others.

    Attributes:
        eos_ids: tokens that end an answer, of the tokenizer and of the model (`engine.end_tokens`).
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_ids: frozenset[int] = frozenset(),
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._variables = dict(variables or {})
        own = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        self.eos_ids = eos_ids | frozenset(own)
        self._special = _special_ids(tokenizer)
        self._backend = _plain_backend(tokenizer)
        self._bytes = _token_bytes(tokenizer)

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        trust_remote_code: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> TextCodec:
        """The tokenizer in a Hugging Face directory; code that comes with it runs only if it is trusted.

        Args:
            directory: of the model.
            trust_remote_code: whether such code is.
            variables: of the chat template, where a request names no others.
        """
        tokenizer = load_tokenizer(directory, trust_remote_code=trust_remote_code)
        return cls(tokenizer, frozenset(end_tokens_of_model(directory)), variables)

    def tokenizer_json(self) -> str | None:
        """The tokenizer in the format of `tokenizer.json`; None if it has no such form."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return None if backend is None else str(backend.to_str())

    def described(self) -> dict[str, Any]:
        """What `tokenizer_config.json` says, special tokens as texts; where files lie is left out."""
        told = {
            name: _as_text(value)
            for name, value in self._tokenizer.init_kwargs.items()
            if name not in _PLACES and value is not None
        }
        told |= {"tokenizer_class": type(self._tokenizer).__name__}
        return told | ({"chat_template": template} if (template := self._tokenizer.chat_template) else {})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a plain prompt."""
        ids: list[int]
        if self._backend is not None:
            (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids = encoded.ids
        else:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    @cached_property
    def tokens_around(self) -> tuple[int, int]:
        """How many special tokens the tokenizer puts in front of a plain prompt, and how many behind."""
        bare, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        front = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        return front, max(0, len(whole) - front - len(bare))

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        documents: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation under the model's chat template.

        Args:
            messages: as templates expect them. tools: OpenAI's form, for a template that knows them.
            add_generation_prompt: whether an assistant turn is opened at the end.
            continue_final_message: whether the last message is left open, to be gone on with.
            add_special_tokens: whether the tokenizer adds its own besides those the template writes.
            documents: to answer from, for a template that shows them.
            variables: of the template, before those that hold where a request names none.

        Raises:
            ApiError: (400) if there is no template, or it cannot render this.
        """
        if not self._tokenizer.chat_template:
            raise bad_request("This model has no chat template; use /v1/completions.", "messages")
        if taken := no_variables(variables or ()):
            raise bad_request(
                f"`chat_template_kwargs` may not set {taken}: other fields of the request or the server do.",
                "chat_template_kwargs",
            )
        if documents and re.search(r"\bdocuments\b", self.template) is None:
            raise bad_request(
                "The model's chat template has no place for `documents`; put them into a message.",
                "documents",
            )
        refusal: Exception | None = None
        for conversation in ways_to_tell(messages, goes_on=continue_final_message):
            try:
                text = self._rendered(
                    conversation,
                    tools=tools,
                    documents=documents,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    **(self._variables | dict(variables or {})),
                )
                break
            except Exception as error:  # templates are programs: on odd messages they fail in any way
                refusal = refusal or error
        else:
            raise bad_request(
                f"The model's chat template refuses these `messages`: {refusal}", "messages"
            ) from None
        # Arguments of calls may hold half a surrogate pair, by its escape in JSON: no tokenizer reads that.
        text = _HALF_PAIR.sub("\N{REPLACEMENT CHARACTER}", text)
        # The template writes the special tokens itself.
        return self.encode(text, add_special_tokens=add_special_tokens)

    @property
    def template(self) -> str:
        """The source of the chat template, of all if there are several; empty without one."""
        source = self._tokenizer.chat_template or ""
        return source if isinstance(source, str) else "\n".join(map(str, source.values()))

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template has a place for tools."""
        return re.search(r"\btools\b", self.template) is not None

    @cached_property
    def reads_parts(self) -> bool:
        """Whether the chat template takes a message's text only as a list of parts: else it would be lost."""
        return not self._shows(_PROBE) and self._shows(_in_parts(_PROBE))

    @cached_property
    def shows_calls(self) -> bool:
        """Whether the chat template writes earlier calls of tools: else they would be lost (Granite 3.3)."""
        return _CALLED in self._called

    @cached_property
    def shows_results(self) -> bool:
        """Whether the chat template writes what calls brought."""
        return str(_PROBE["content"]) in self._called

    @cached_property
    def _called(self) -> str:
        """What the chat template makes of a conversation with a call; all of it, if it refuses any."""
        ways = ways_to_tell(_CONVERSATION, goes_on=False)
        told = ([_in_parts(message) for message in way] if self.reads_parts else way for way in ways)
        return next(filter(None, map(self._attempted, told)), str(_CONVERSATION))

    def _shows(self, message: dict[str, Any]) -> bool:
        return str(_PROBE["content"]) in self._attempted([message])

    def _attempted(self, messages: list[dict[str, Any]]) -> str:
        """What the chat template writes; nothing if it refuses."""
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception:  # templates are programs: they fail in any way
            return ""

    def _rendered(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        told = [_in_parts(message) for message in messages] if self.reads_parts else messages
        return str(self._tokenizer.apply_chat_template(told, tokenize=False, **variables))

    def bad_word_tokens(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences of words, at the beginning of a text and after a space, as vLLM bars them."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            plain = tuple(self.encode(word.lstrip(), add_special_tokens=False))
            spaced = tuple(self.encode(" " + word.lstrip(), add_special_tokens=False))
            found[plain] = None
            # A space that is a token by itself says nothing of the word.
            if len(spaced) == len(plain):
                found[spaced] = None
        return tuple(word for word in found if word)

    def detokenizer(
        self, *, skip_special_tokens: bool = True, keep: Sequence[str] = (), after: Sequence[int] = ()
    ) -> Detokenizer:
        """For the output of one request.

        Args:
            skip_special_tokens: whether they are left out, but for those in `keep`.
            keep: special tokens that are shown.
            after: tokens of the text that the output goes on with; none if it is a text by itself.
        """
        ids = [(token, self._tokenizer.convert_tokens_to_ids(token)) for token in keep]
        # One that there is not may have the id of the unknown token.
        kept = {
            own
            for token, own in ids
            if own is not None and self._tokenizer.convert_ids_to_tokens(own) == token
        }
        skipped = self._special - kept if skip_special_tokens else frozenset[int]()
        if self._bytes is not None:
            return ByteDetokenizer(self._bytes, skipped)
        context: list[int] = []
        for token in reversed(after):
            # It does not begin within a character that is spelled in bytes.
            if len(context) >= _CONTEXT and not self._is_byte(context[-1]):
                break
            if token not in skipped:
                context.append(token)
        return WindowDetokenizer(self._decoded, skipped, context[::-1])

    def _is_byte(self, token: int) -> bool:
        return _BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token))) is not None

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens, all at once."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join(map(detokenizer.feed, ids)) + detokenizer.finish()

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for, by itself."""
        if self._bytes is not None:
            return self._bytes[token] if 0 <= token < len(self._bytes) else b""
        alone = self._decoded([token])
        byte = _BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token)))
        if byte is not None and alone != byte[0]:
            return bytes([int(byte[1], 16)])
        # Decoders drop a space at the beginning of a text: the second of two has it.
        return self._decoded([token, token])[len(alone) :].encode()

    def _decoded(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))

    def single_token(self, text: str) -> int | None:
        """The token that a text is by itself; None if it is several."""
        tokens = self.encode(text, add_special_tokens=False)
        return tokens[0] if len(tokens) == 1 else None

    def special_text(self, token: int) -> str | None:
        """A special token as it is written; None for any other token."""
        return str(self._tokenizer.convert_ids_to_tokens(token)) if token in self._special else None

    def vocabulary_entry(self, token: int) -> str:
        """A token as the vocabulary spells it: no two are spelled alike, and spaces may have other signs."""
        return str(self._tokenizer.convert_ids_to_tokens(token))

    def token_text(self, token: int) -> str:
        """One token as shown in log-probabilities; invalid UTF-8 as OpenAI shows it."""
        data = self.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    text = message.get("content")
    return message | {"content": [{"type": "text", "text": text}] if text else []}


def _plain_backend(tokenizer: Any) -> Any | None:
    """What encodes a text, where Transformers only converts what it says; None if it does more.

    For a megabyte the conversion takes twice as long as the tokens, of processors that others want.
    """
    from transformers import TokenizersBackend

    kind = type(tokenizer)
    is_plain = (
        isinstance(tokenizer, TokenizersBackend)
        and kind.encode is TokenizersBackend.encode
        and kind._encode_plus is TokenizersBackend._encode_plus
        and not tokenizer.split_special_tokens
    )
    if not is_plain:
        return None
    # As Transformers sees to before every call: files may say otherwise.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer.backend_tokenizer


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """Special tokens, also those without a name: Llama 3's headers are only marked so in the vocabulary."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    marked = {int(token) for token, entry in added if entry.special}
    return frozenset(marked | {int(token) for token in tokenizer.all_special_ids})


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


def _as_text(value: Any) -> Any:
    """Added tokens by their text, also in lists and by their ids."""
    if isinstance(value, Mapping):
        return {str(name): _as_text(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_text(one) for one in value]
    return value if isinstance(value, str | int | float | None) else str(value)
