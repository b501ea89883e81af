"""Answers in channels, as gpt-oss writes them (OpenAI's Harmony format): thoughts apart from what is said."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from enum import Enum, auto

from deployments.tool_calls import FUNCTION_NAME, overlap

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
#: What a header begins with.
OPENS = (START, CHANNEL)
END, CALL = "<|end|>", "<|call|>"
#: What ends a message; the last two end the answer, too, mostly as stop tokens that are in no text.
ENDS = (END, CALL, "<|return|>")
#: All of them.
MARKERS = (*OPENS, MESSAGE, CONSTRAIN, *ENDS)
#: The channel of thoughts, and that of what is said in the end.
ANALYSIS, FINAL = "analysis", "final"
#: What is in front of the name of a function that a message is for; models forget it at times.
FUNCTIONS = "functions."
#: By what a chat template shows that its model writes so.
SHOWN_BY = CHANNEL + ANALYSIS
#: A header names a role, a channel, whom it is for and in which form; what is longer is none.
LONGEST_HEADER = 512
_FUNCTION = re.compile(rf"\bto=(?:{re.escape(FUNCTIONS)})?({FUNCTION_NAME})")
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")


def called(header: str) -> str:
    """The function that a message with that header calls, in whichever part of it that stands; else empty."""
    found = _FUNCTION.search(header)
    return "" if found is None else found[1]


class _Where(Enum):
    """Which part of an answer the next character belongs to."""

    BETWEEN = auto()  # before a header, or text without one
    HEADER = auto()
    BODY = auto()


class HarmonyParser:
    """Divides the text of one answer, in pieces of any size, into what is thought and what is said.

    An answer is messages, each with a header that names its channel. Thoughts are those of `analysis`; the
    others are what is said, a blank line between two of them. Text without a header is said. What is thought
    when something has been said is left out: in all APIs thoughts come first.

    Args:
        is_told: whether what is thought is told, or left out.
        functions: messages that call these are said with their headers and an end, for `HarmonyCalls`.

    Attributes:
        markers: tokens that are to be seen in the text, though they are special ones.
        is_told: as above.
        num_tokens: of thoughts so far, with their headers. Of those that came with the end of a thought as
            many as their share of the text.
    """

    def __init__(self, *, is_told: bool = True, functions: Collection[str] = ()) -> None:
        self.markers: tuple[str, ...] = MARKERS
        self._functions = functions
        self.is_told = is_told
        self.num_tokens = self._num_early = 0
        self._where = _Where.BETWEEN
        self._is_thought = self._is_call = False  # of the message at hand
        self._held = ""
        # Whether a message of that kind has been told, and whether another one has begun since.
        self._has, self._is_another = {True: False, False: False}, {True: False, False: False}

    def feed(self, text: str, tokens: Sequence[int] = ()) -> tuple[str, str]:
        """More text: what of it, and of what was held back, is certain to be thought, and said.

        Args:
            text: what became certain with `tokens`.
        """
        was_thought, was_open = self._is_thought, self._where is _Where.BODY
        self._held += text
        parts = {True: "", False: ""}
        while self._advance(parts):
            pass
        self._count(was_thought and was_open, len(parts[True]), text, len(tokens))
        return self._told(parts)

    def finish(self) -> tuple[str, str]:
        """The rest, when no more text comes; a header that was cut off is nothing."""
        parts = {True: "", False: ""}
        if self._where is _Where.HEADER and len(self._held) > LONGEST_HEADER:
            self._add(self._held, parts, is_thought=False)
        elif self._where is not _Where.HEADER:
            is_body = self._where is _Where.BODY
            self._add(self._held if is_body else self._held.lstrip(), parts, self._is_thought and is_body)
        self._held = ""
        return self._told(parts)

    def _told(self, parts: dict[bool, str]) -> tuple[str, str]:
        return parts[True] if self.is_told else "", parts[False]

    def _count(self, was_thought: bool, num_thought: int, text: str, num: int) -> None:
        is_thought = self._is_thought and self._where is _Where.BODY
        if self._where is _Where.BODY and not was_thought and is_thought:
            self.num_tokens += self._num_early + num  # its header came before
        elif was_thought and is_thought:
            self.num_tokens += num
        elif was_thought:
            self.num_tokens += min(num, round(num * num_thought / max(1, len(text))))
        self._num_early = 0 if self._where is _Where.BODY else self._num_early + num * (not was_thought)

    def _advance(self, parts: dict[bool, str]) -> bool:
        """Decide what can be decided next; whether anything was."""
        if self._where is _Where.BETWEEN:
            return self._begin()
        if self._where is _Where.HEADER:
            return self._read_header(parts)
        found = [(at, mark) for mark in (*ENDS, *OPENS) if (at := self._held.find(mark)) >= 0]
        if not found:
            # The end of the text may be the beginning of a mark.
            certain = len(self._held) - max(overlap(self._held, mark) for mark in (*ENDS, *OPENS))
            self._add(self._held[:certain], parts, self._is_thought)
            self._held = self._held[certain:]
            return False
        at, mark = min(found)
        self._add(self._held[:at], parts, self._is_thought)
        is_end = mark in ENDS
        self._held = self._held[at + len(mark) if is_end else at :]
        self._where = _Where.BETWEEN if is_end else _Where.HEADER
        if self._is_call:
            self._add(CALL, parts, is_thought=False)
            self._is_call = False
        return True

    def _begin(self) -> bool:
        """Go on once it is certain whether a header stands here."""
        following = self._held.lstrip()
        if following.startswith(OPENS):
            self._where, self._held = _Where.HEADER, following
            return True
        if any(mark.startswith(following) for mark in OPENS):  # as nothing does
            return False
        self._message(is_thought=False)
        return True

    def _read_header(self, parts: dict[bool, str]) -> bool:
        at = self._held.find(MESSAGE)
        if at < 0 and len(self._held) < LONGEST_HEADER + len(MESSAGE):
            return False
        if 0 <= at <= LONGEST_HEADER:
            header, self._held = self._held[:at], self._held[at + len(MESSAGE) :]
            self._is_call = called(header) in self._functions
            channel = _CHANNEL.search(header)
            is_analysis = channel is not None and channel[1] == ANALYSIS
            self._message(is_thought=is_analysis and not self._is_call)
            if self._is_call:
                self._is_another[False] = False
                self._add(header + MESSAGE, parts, is_thought=False)
        else:  # it is none
            self._message(is_thought=False)
            self._add(self._held[:LONGEST_HEADER], parts, is_thought=False)
            self._held = self._held[LONGEST_HEADER:]
        return True

    def _message(self, *, is_thought: bool) -> None:
        self._where, self._is_thought = _Where.BODY, is_thought
        self._is_another[is_thought] = self._has[is_thought]

    def _add(self, text: str, parts: dict[bool, str], is_thought: bool) -> None:
        if not text or (is_thought and self._has[False]):
            return
        if self._is_another[is_thought]:
            parts[is_thought] += "\n\n"
            self._is_another[is_thought] = False
        parts[is_thought] += text
        self._has[is_thought] = True
