"""Answers in channels, as gpt-oss writes them (OpenAI's Harmony format): thoughts apart from what is said."""

from __future__ import annotations

import re
from collections import deque
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
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}(\w+)")
# What an answer may begin with in place of a mark, as the prompt has begun its first header.
_RECIPIENT = "to="


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
    when something has been said is left out: in all APIs thoughts come first. The first header may go on
    with whom the message is for, since the prompt has begun it.

    Args:
        is_told: whether what is thought is told, or left out.
        functions: messages that call these are said with their headers and an end, for `HarmonyCalls`.
        is_form: whether what is said keeps to a form: then nothing is but `final`, calls, and text without a
            header, and the rest is thought.

    Attributes:
        markers: tokens that are to be seen in the text, though they are special ones.
        is_told: as above.
    """

    def __init__(
        self, *, is_told: bool = True, functions: Collection[str] = (), is_form: bool = False
    ) -> None:
        self.markers: tuple[str, ...] = MARKERS
        self._functions = functions
        self._is_form = is_form
        self.is_told = is_told
        self._where = _Where.BETWEEN
        self._is_first = True  # header of the answer
        self._is_thought = self._is_call = False  # of the message at hand
        self._held = ""
        # Characters and tokens of the texts that what is held came with, and how many of them are thoughts'.
        self._fed: deque[tuple[int, float]] = deque()
        self._num_textless = 0
        self._num_thought = 0.0
        # Whether a message of that kind has been told, and whether another one has begun since.
        self._has, self._is_another = {True: False, False: False}, {True: False, False: False}

    @property
    def num_tokens(self) -> int:
        """Of thoughts so far, with their marks; where tokens came with others a share, by their text."""
        return round(self._num_thought)

    def feed(self, text: str, tokens: Sequence[int] = ()) -> tuple[str, str]:
        """More text: what of it, and of what was held back, is certain to be thought, and said.

        Args:
            text: what became certain with `tokens`.
        """
        self._num_textless += len(tokens)
        if text:
            self._fed.append((len(text), float(self._num_textless)))
            self._num_textless = 0
        self._held += text
        parts = {True: "", False: ""}
        while self._advance(parts):
            pass
        return self._told(parts)

    def finish(self) -> tuple[str, str]:
        """The rest, when no more text comes; a header that was cut off is nothing."""
        parts = {True: "", False: ""}
        is_header = self._where is _Where.HEADER and self._held.startswith(OPENS)
        if is_header and len(self._held) > LONGEST_HEADER:
            self._add(self._held, parts, is_thought=False)
        elif not is_header:
            is_body = self._where is _Where.BODY
            self._add(self._held if is_body else self._held.lstrip(), parts, self._is_thought and is_body)
            self._take(len(self._held), is_thought=self._is_thought and is_body)
        self._held = ""
        return self._told(parts)

    def _told(self, parts: dict[bool, str]) -> tuple[str, str]:
        return parts[True] if self.is_told else "", parts[False]

    def _take(self, size: int, *, is_thought: bool) -> None:
        """Go on behind so many characters, which are a thought's, with its marks, or not."""
        self._held = self._held[size:]
        while size > 0 and self._fed:
            there, tokens = self._fed.popleft()
            taken = min(size, there)
            share = tokens * taken / there
            self._num_thought += share if is_thought else 0.0
            if taken < there:
                self._fed.appendleft((there - taken, tokens - share))
            size -= taken

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
            self._take(certain, is_thought=self._is_thought)
            return False
        at, mark = min(found)
        self._add(self._held[:at], parts, self._is_thought)
        is_end = mark in ENDS
        self._take(at + len(mark) if is_end else at, is_thought=self._is_thought)
        self._where = _Where.BETWEEN if is_end else _Where.HEADER
        if self._is_call:
            self._add(CALL, parts, is_thought=False)
            self._is_call = False
        return True

    def _begin(self) -> bool:
        """Go on once it is certain whether a header stands here."""
        following = self._held.lstrip()
        opens = (*OPENS, _RECIPIENT) if self._is_first else OPENS
        if following.startswith(opens):
            self._where = _Where.HEADER
            self._take(len(self._held) - len(following), is_thought=False)
            return True
        if any(mark.startswith(following) for mark in opens):  # as nothing does
            return False
        self._message(is_thought=False)
        return True

    def _read_header(self, parts: dict[bool, str]) -> bool:
        at = self._held.find(MESSAGE)
        if at < 0 and len(self._held) < LONGEST_HEADER + len(MESSAGE):
            return False
        if 0 <= at <= LONGEST_HEADER:
            header = self._held[:at]
            self._is_call = called(header) in self._functions
            channel = _CHANNEL.search(header)
            name = "" if channel is None else channel[1]
            is_thought = name != FINAL if self._is_form else name == ANALYSIS
            self._message(is_thought=is_thought and not self._is_call)
            self._take(at + len(MESSAGE), is_thought=self._is_thought)
            if self._is_call:
                self._is_another[False] = False
                begun = "" if header.startswith(OPENS) else f"{START}assistant "
                self._add(begun + header + MESSAGE, parts, is_thought=False)
        else:  # it is none
            self._message(is_thought=False)
            self._add(self._held[:LONGEST_HEADER], parts, is_thought=False)
            self._take(LONGEST_HEADER, is_thought=False)
        return True

    def _message(self, *, is_thought: bool) -> None:
        self._where, self._is_thought, self._is_first = _Where.BODY, is_thought, False
        self._is_another[is_thought] = self._has[is_thought]

    def _add(self, text: str, parts: dict[bool, str], is_thought: bool) -> None:
        if not text or (is_thought and self._has[False]):
            return
        if self._is_another[is_thought]:
            parts[is_thought] += "\n\n"
            self._is_another[is_thought] = False
        parts[is_thought] += text
        self._has[is_thought] = True
