"""Text of tokens that arrive one by one: no broken characters, and no change to what was already given."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

#: Tokens that may wait for the end of a character before the first of them are given up.
_MOST_WAITING = 16
#: Of those, the last that may have its first bytes: it has no more than four.
_MOST_BEGUN = 3


class Detokenizer(Protocol):
    """Turns the tokens of one request into text."""

    def feed(self, token: int) -> str:
        """The text that became certain with `token`; may be empty."""
        ...

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies, where a text is the concatenation of its tokens' bytes.

    Incomplete UTF-8 waits for the token that completes it; invalid UTF-8 becomes U+FFFD as the tokenizer
    itself would have it. The concatenated output is exactly what decoding all tokens at once gives.
    """

    def __init__(self, token_bytes: Sequence[bytes], skipped: Collection[int] = ()) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """See `Detokenizer`; ids outside the vocabulary (padding rows of the head) have no text."""
        if token in self._skipped or not 0 <= token < len(self._token_bytes):
            return ""
        return self._decoder.decode(self._token_bytes[token])

    def finish(self) -> str:
        """See `Detokenizer`."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other tokenizer: decodes a short window of tokens with and without the new ones.

    Sentence-piece decoders drop the space at the beginning of a text and join byte tokens, so a token's text
    is known only with some context before it.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        skipped: Collection[int] = (),
        context: Sequence[int] = (),
    ) -> None:
        """Of what follows `context`, the end of a text; one that ends within a character is not looked at."""
        self._decode = decode
        self._skipped = skipped
        self._tokens = [] if decode(list(context)).endswith("�") else list(context)
        self._start = 0  # the window's context begins here
        self._shown = len(self._tokens)  # its new tokens begin here: the text of all before was given

    def feed(self, token: int) -> str:
        """See `Detokenizer`."""
        if token in self._skipped:
            return ""
        self._tokens.append(token)
        return self._advance(final=False)

    def finish(self) -> str:
        """See `Detokenizer`."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        if self._shown == len(self._tokens):
            return ""
        before = self._decode(self._tokens[self._start : self._shown])
        after = self._decode(self._tokens[self._start :])
        # A replacement character at the end may be half a character: wait for the rest.
        end = len(self._tokens)
        if after.endswith("�") and not final and end - self._shown > _MOST_WAITING:
            # Of a model that writes nothing else the window would grow, and take ever longer to decode.
            end -= _MOST_BEGUN
            after = self._decode(self._tokens[self._start : end])
        elif len(after) <= len(before) or (after.endswith("�") and not final):
            return after[len(before) :] if final else ""
        self._start, self._shown = self._shown, end
        return after[len(before) :]


def byte_table(pieces: Sequence[str | None]) -> list[bytes]:
    """Bytes of every token of a GPT-2 style byte-level vocabulary, from its printable form.

    As in the `tokenizers` library, a piece with any character outside the byte alphabet (an added token) is
    taken as it is written.
    """
    alphabet = _byte_alphabet()
    table = []
    for piece in pieces:
        if piece is None:
            table.append(b"")
        elif all(character in alphabet for character in piece):
            table.append(bytes(alphabet[character] for character in piece))
        else:
            table.append(piece.encode())
    return table


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in GPT-2's vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet
