"""Tokenizers as spellings of bytes: what each token says, and which tokens say a text.

Byte-level tokenizers (GPT-2, Llama 3, Qwen) and SentencePiece-like ones with byte fallback (Llama 2, Gemma,
Mistral) can spell any bytes, and each of their tokens stands for the same bytes wherever it occurs. Those are
the ones that retokenization works with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

_FILE = "tokenizer.json"
_SPACE = "\u2581"
_ROLES = ("bos_token", "eos_token")


class Vocabulary:
    """A tokenizer that spells exactly the bytes it is given, and never reads special tokens out of text.

    Attributes:
        begin: tokens that its model expects before any text; none if it has no such token.
    """

    def __init__(self, directory: Path) -> None:
        """Read the tokenizer of a Hugging Face directory.

        Raises:
            FileNotFoundError: if there is no tokenizer.json.
            ValueError: if the tokenizer cannot spell any bytes.
        """
        file = directory / _FILE
        if not file.is_file():
            raise FileNotFoundError(f"no tokenizer in {directory}: it has no {_FILE}")
        raw = file.read_text(encoding="utf-8")
        data: dict[str, Any] = json.loads(raw)
        is_byte_level = any(part.get("type") == "ByteLevel" for part in _parts(data.get("decoder")))
        if not is_byte_level and not data["model"].get("byte_fallback"):
            raise ValueError(
                f"the tokenizer in {directory} is neither byte-level nor has it byte fallback, so not every "
                "text can be spelled with its tokens"
            )
        core = Tokenizer.from_str(json.dumps(_exact(data, is_byte_level)))
        core.encode_special_tokens = True
        self._core = core
        special = {t["content"]: int(t["id"]) for t in data["added_tokens"] if t["special"]}
        plain = {
            int(t["id"]): t["content"].encode() if is_byte_level else _fallback_piece(t["content"])
            for t in data["added_tokens"]
            if not t["special"]
        }
        names: dict[str, int] = core.get_vocab(with_added_tokens=True)
        alphabet = _byte_alphabet()
        self._pieces: list[bytes | None] = [None] * (max(names.values()) + 1)
        for name, token in names.items():
            if name not in special:
                piece = _byte_level_piece(name, alphabet) if is_byte_level else _fallback_piece(name)
                self._pieces[token] = plain.get(token, piece)
        self._bytes: dict[int, int] = {}
        for name, token in names.items():
            content = self._pieces[token]
            if content is not None and len(content) == 1 and (is_byte_level or name.startswith("<0x")):
                self._bytes[content[0]] = token
        self._special = special
        self._names = {token: name for name, token in special.items()}
        self._roles = _roles(directory)
        begin = self._special.get(self._roles.get("bos_token", ""), -1)
        opens = begin in Tokenizer.from_str(raw).encode("").ids
        self.begin: tuple[int, ...] = (begin,) if opens else ()

    def piece(self, token: int) -> bytes | None:
        """The bytes a token stands for; None for special tokens and numbers that are no token."""
        return self._pieces[token] if 0 <= token < len(self._pieces) else None

    def special_name(self, token: int) -> str | None:
        """The name of a special token; None for others."""
        return self._names.get(token)

    def spell(self, text: bytes) -> list[int] | None:
        """Tokens that stand for exactly `text`, as the tokenizer would cut it; None if it has no such.

        Bytes that are no UTF-8, such as half a character, are spelled byte by byte.
        """
        tokens: list[int] = []
        while text:
            try:
                run, stray, rest = text.decode(), b"", b""
            except UnicodeDecodeError as error:
                run, stray, rest = (
                    text[: error.start].decode(),
                    text[error.start : error.end],
                    text[error.end :],
                )
            spelled = self._encode(run) + [self._bytes.get(byte, -1) for byte in stray]
            if -1 in spelled:
                return None
            tokens += spelled
            text = rest
        return tokens

    def _encode(self, run: str) -> list[int]:
        if not run:
            return []
        found = self._core.encode(run, add_special_tokens=False)
        ids: list[int] = found.ids
        if self._joined(ids) == run.encode():
            return ids
        mended = self._mended(run, ids, found.offsets)
        return mended if self._joined(mended) == run.encode() else self._bytewise(run)

    def _mended(self, run: str, ids: list[int], offsets: list[tuple[int, int]]) -> list[int]:
        """Tokens of a text, where those that are not exactly what it says are spelled byte by byte.

        Args:
            run: the text.
            ids: its tokens.
            offsets: the characters that each stands for; several may stand for one, and for some there may be
                none, as where a token takes the spaces beside it.
        """
        tokens: list[int] = []
        end = first = 0
        while first < len(ids):
            begin, until = offsets[first]
            last = first + 1
            while last < len(ids) and offsets[last][0] < until:
                until = max(until, offsets[last][1])
                last += 1
            part = run[begin:until]
            tokens += self._bytewise(run[end:begin])
            tokens += (
                ids[first:last] if self._joined(ids[first:last]) == part.encode() else self._bytewise(part)
            )
            end, first = until, last
        return tokens + self._bytewise(run[end:])

    def _bytewise(self, run: str) -> list[int]:
        return [self._bytes.get(byte, -1) for byte in run.encode()]

    def _joined(self, ids: list[int]) -> bytes:
        return b"".join(self.piece(token) or b"" for token in ids)

    def counterparts(self, other: Vocabulary) -> dict[int, int]:
        """The special tokens of this vocabulary that the other one has too: by name, or by role."""
        found: dict[int, int] = {}
        for role in _ROLES:
            mine = self._special.get(self._roles.get(role, ""))
            theirs = other._special.get(other._roles.get(role, ""))
            if mine is not None and theirs is not None:
                found[mine] = theirs
        for name, token in self._special.items():
            if name in other._special:
                found[token] = other._special[name]
        return found


def have_same_tokens(one: Path, other: Path) -> bool | None:
    """Whether the tokenizers of two Hugging Face directories number the same tokens in the same way.

    None if one of them has no tokenizer.json.
    """
    files = [directory / _FILE for directory in (one, other)]
    if not all(file.is_file() for file in files):
        return None
    if files[0].read_bytes() == files[1].read_bytes():
        return True
    a, b = (Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True) for file in files)
    return bool(a == b)


def _parts(component: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A component of a tokenizer, and those it is a sequence of."""
    if component is None:
        return
    yield component
    for key in ("pretokenizers", "decoders", "normalizers"):
        for part in component.get(key, ()):
            yield from _parts(part)


def _exact(data: dict[str, Any], is_byte_level: bool) -> dict[str, Any]:
    """The tokenizer without what adds to a text or changes it, so that its tokens join to the same bytes."""
    data = data | {"truncation": None, "padding": None, "post_processor": None, "normalizer": None}
    has_metaspace = False
    for part in _parts(data.get("pre_tokenizer")):
        if part["type"] == "ByteLevel":
            part["add_prefix_space"] = False
        elif part["type"] == "Metaspace":
            part["prepend_scheme"] = "never"
            has_metaspace = True
    if not is_byte_level and not has_metaspace:
        data["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    return data


def _roles(directory: Path) -> dict[str, str]:
    """The names of the special tokens that begin and end a text, as far as the directory says."""
    roles: dict[str, str] = {}
    for file in (directory / "special_tokens_map.json", directory / "tokenizer_config.json"):
        if not file.is_file():
            continue
        settings = json.loads(file.read_text(encoding="utf-8"))
        for role in _ROLES:
            token = settings.get(role)
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str):
                roles[role] = token
    return roles


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update((chr(256 + number), byte) for number, byte in enumerate(others))
    return alphabet


def _byte_level_piece(name: str, alphabet: dict[str, int]) -> bytes | None:
    try:
        return bytes(alphabet[character] for character in name)
    except KeyError:
        return None


def _fallback_piece(name: str) -> bytes:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes([int(name[3:5], 16)])
    return name.replace(_SPACE, " ").encode()
