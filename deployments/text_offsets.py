"""Where in the text of a completion its tokens begin, as log-probabilities tell it."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.detokenizer import Detokenizer
from deployments.text_codec import TextCodec


class TextOffsets:
    """Counts the characters of an answer, token by token.

    A token begins where the text of all before it ends: one that has no text of its own, as a special token
    or the first bytes of a character, where the next one does. Tokens of a stop string that is cut away begin
    at the end of the text or behind it.

    Args:
        detokenizer: for the same output, and nothing else.
        start: characters in front of the answer.
    """

    def __init__(self, detokenizer: Detokenizer, start: int = 0) -> None:
        self._detokenizer = detokenizer
        self._at = start

    def of(self, tokens: Sequence[int]) -> list[int]:
        """Where the answer's next tokens begin."""
        offsets = []
        for token in tokens:
            offsets.append(self._at)
            self._at += len(self._detokenizer.feed(token))
        return offsets


def echo_offsets(codec: TextCodec, prompt: Sequence[int], echo: str) -> list[int]:
    """Where the prompt's tokens begin in `echo`, its text in front of the answer."""
    detokenizer, at, offsets = codec.detokenizer(), 0, []
    for token in prompt:
        offsets.append(min(at, len(echo)))
        special = codec.special_text(token)
        if special is None:
            at += len(detokenizer.feed(token))
        elif echo.startswith(special, at):
            at += len(special)  # the client wrote it; those that the tokenizer adds are not shown
    return offsets
