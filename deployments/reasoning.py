"""What a model thinks before it answers, told apart from its answer."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol

import msgspec

from deployments import harmony
from deployments.answer_marks import AnswerMarks
from deployments.openai_schema import ChatRequest, GenerationRequest
from deployments.text_codec import TextCodec
from deployments.tool_calls import overlap
from deployments.tools import ToolUse
from engine.constraint import Constraint, Thought

#: How each kind of model marks the beginning and the end of what it thinks.
MARKERS = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "gemma4": ("<|channel>thought", "<channel|>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
}
#: What stands around an answer's text, where something does.
_AROUND_TEXT = {
    "cohere": (("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")),
}
#: The tokens that these begin with, where they are not one.
_TOKENS = {"<|channel>thought": "<|channel>"}

#: No mark, with white space behind it, is of more tokens.
_MARK_TOKENS = 32


class ThoughtParser(Protocol):
    """Divides the text of one answer, in pieces of any size, into what is thought and what is said.

    Attributes:
        markers: tokens that are to be seen in the text, though they may be special ones.
        is_told: whether what is thought is told, or left out.
    """

    markers: tuple[str, ...]
    is_told: bool

    @property
    def num_tokens(self) -> int:
        """Of the thought so far, with its marks."""
        ...

    def feed(self, text: str, tokens: Sequence[int] = ()) -> tuple[str, str]:
        """More text: what of it, and of what was held back, is certain to be thought, and said."""
        ...

    def finish(self) -> tuple[str, str]:
        """The rest, when no more text comes."""
        ...


def kind_for_template(template: str) -> str:
    """How a model with that chat template marks what it thinks, "none" if it shows no way.

    Templates that know of it show at least the end: they leave out what was thought in earlier turns.
    """
    if harmony.SHOWN_BY in template:
        return "harmony"
    return next((kind for kind, (_, end) in MARKERS.items() if end in template), "none")


class _Where(Enum):
    """Which part of an answer the next character belongs to."""

    START = auto()  # nothing but white space so far
    OPENED = auto()  # behind the mark of the beginning
    THOUGHT = auto()
    CLOSED = auto()  # behind the mark of the end
    ANSWER = auto()


class ReasoningParser:
    """Divides the text of one answer, in pieces of any size, into what is thought and what is said.

    Only what an answer begins with is a thought, and one that does not end is all there is. White space
    behind both marks is left out, since templates put their own there.

    Args:
        kind: of `MARKERS`.
        is_open: whether the prompt ends with the mark of the beginning, as some templates have it. A model
            may write it all the same.
        is_told: whether what is thought is told, or left out.
        close_token: that of the mark of the end, if it is one.
        is_form: whether the answer keeps to a form, of which white space at its beginning is a part.
        goes_on: whether the prompt ends within the answer's text.

    Attributes:
        markers: tokens that are to be seen in the text, though they may be special ones.
        is_told: as above.
        num_tokens: of the thought so far, with its marks. Without a `close_token`, those that came with the
            end of the thought count by their share of the text.
    """

    def __init__(
        self,
        kind: str,
        *,
        is_open: bool,
        is_told: bool = True,
        close_token: int | None = None,
        is_form: bool = False,
        goes_on: bool = False,
    ) -> None:
        self._open, self._close = MARKERS[kind]
        around = _AROUND_TEXT.get(kind, ())
        self._around_text = AnswerMarks(around, is_begun=goes_on)
        marks = [*MARKERS[kind], *(mark for pair in around for mark in pair)]
        self.markers: tuple[str, ...] = tuple(_TOKENS.get(mark, mark) for mark in marks)
        self._is_open = is_open
        self.is_told = is_told
        self._close_token = close_token
        self._is_form = is_form
        self._where = _Where.START
        self._held = ""
        self._has_thought = False
        self._num_behind = 0  # characters of the last text that came behind the thought
        self.num_tokens = self._num_early = 0

    def feed(self, text: str, tokens: Sequence[int] = ()) -> tuple[str, str]:
        """More text: what of it, and of what was held back, is certain to be thought, and said.

        Args:
            text: what became certain with `tokens`.
        """
        before = self._where
        thought, said = self._divide(text)
        self._count(before, text, tokens)
        return thought if self.is_told else "", self._around_text.feed(said)

    def finish(self) -> tuple[str, str]:
        """The rest, when no more text comes."""
        rest, self._held = self._held, ""
        if self._where is _Where.START and self._is_open:
            self._where, rest = _Where.THOUGHT, rest.lstrip()
            self.num_tokens = self._num_early
        if self._where is not _Where.THOUGHT:
            return "", self._around_text.feed(rest) + self._around_text.finish()
        return rest if self.is_told else "", ""

    def _divide(self, text: str) -> tuple[str, str]:
        self._held += text
        thought = ""
        if self._where is _Where.START:
            self._start()
        self._skip_space(_Where.OPENED, _Where.THOUGHT)
        if self._where is _Where.THOUGHT:
            thought = self._until_close()
        self._skip_space(_Where.CLOSED, _Where.ANSWER)
        if self._where is not _Where.ANSWER:
            return thought, ""
        said, self._held = self._held, ""
        return thought, said

    def _count(self, before: _Where, text: str, tokens: Sequence[int]) -> None:
        if self._where is _Where.START:
            self._num_early += len(tokens)
        elif self._has_thought and before not in (_Where.CLOSED, _Where.ANSWER):
            if before is _Where.START:
                self.num_tokens = self._num_early
            num = len(tokens)
            if self._where in (_Where.CLOSED, _Where.ANSWER):
                ends = [place for place, token in enumerate(tokens, 1) if token == self._close_token]
                share = 1 - self._num_behind / max(1, len(text))
                num = ends[0] if ends else min(num, max(0, round(num * share)))
            self.num_tokens += num

    def _start(self) -> None:
        """Go on once it is certain whether the mark of the beginning stands here."""
        following = self._held.lstrip()
        if following.startswith(self._open):
            self._where, self._held = _Where.OPENED, following[len(self._open) :]
        elif self._open.startswith(following):  # as nothing does
            return
        else:
            self._where = _Where.OPENED if self._is_open else _Where.ANSWER
        self._has_thought = self._where is _Where.OPENED

    def _skip_space(self, where: _Where, then: _Where) -> None:
        if self._where is where:
            self._held = self._held.lstrip()
            self._where = then if self._held else where

    def _until_close(self) -> str:
        thought, close, rest = self._held.partition(self._close)
        if close:
            self._where, self._held = _Where.ANSWER if self._is_form else _Where.CLOSED, rest
            self._num_behind = len(rest)
            return thought
        # The end of the text may be the beginning of the mark.
        certain = len(thought) - overlap(thought, self._close)
        self._held = thought[certain:]
        return thought[:certain]


def make_parser(
    kind: str,
    request: GenerationRequest,
    prompt: Sequence[int],
    codec: TextCodec,
    constraint: Constraint | None = None,
    use: ToolUse | None = None,
) -> ThoughtParser | None:
    """The parser of that kind for an answer in a conversation; None for any answer that has no thought.

    Args:
        kind: of `MARKERS`, "harmony" or "none".
        request, prompt: what is answered, and its tokens.
        codec: the target's tokenizer.
        constraint: of the answer, if there is one, as of `with_thought`.
        use: its tools.
    """
    if kind == "none" or not isinstance(request, ChatRequest):
        return None
    has_messages = use is not None and use.forces_message
    if constraint is not None and constraint.thought is None and not has_messages:
        return None
    is_told = request.include_reasoning is not False
    if kind == "harmony":
        return harmony.HarmonyParser(
            is_told=is_told,
            functions=() if use is None else use.in_messages,
            is_form=constraint is not None,
        )
    is_open = _is_open(kind, request, prompt, codec) is True
    return ReasoningParser(
        kind,
        is_open=is_open,
        is_told=is_told,
        close_token=codec.single_token(MARKERS[kind][1]),
        is_form=constraint is not None,
        goes_on=bool(request.continue_final_message) and not is_open,
    )


def with_thought(
    constraint: Constraint | None,
    kind: str,
    request: GenerationRequest,
    prompt: Sequence[int],
    codec: TextCodec,
    use: ToolUse | None = None,
) -> Constraint | None:
    """The constraint of an answer, with the thought that may come before it; arguments as of `make_parser`.

    There is none where the prompt has ended it already, or where its marks are no tokens. In channels all is
    a thought until a message begins that is said.
    """
    if constraint is None or kind == "none" or not isinstance(request, ChatRequest):
        return constraint
    if kind == "harmony":
        if use is not None and use.forces_message:
            return constraint
        thought = _until_said(request, codec, may_call=use is not None and bool(use.in_messages))
        return constraint if thought is None else msgspec.structs.replace(constraint, thought=thought)
    is_open = _is_open(kind, request, prompt, codec)
    begin, end = (codec.single_token(_TOKENS.get(mark, mark)) for mark in MARKERS[kind])
    if is_open is None or begin is None or end is None:
        return constraint
    thought = Thought(open_token=begin, close_token=end, is_open=is_open)
    return msgspec.structs.replace(constraint, thought=thought)


def _until_said(request: ChatRequest, codec: TextCodec, *, may_call: bool) -> Thought | None:
    """What comes before the text of an answer in channels; a call among it ends the answer."""
    channel, message, call = map(codec.single_token, (harmony.CHANNEL, harmony.MESSAGE, harmony.CALL))
    if request.continue_final_message or channel is None or message is None:
        return None
    said = tuple(codec.encode(harmony.FINAL, add_special_tokens=False))
    ends = (call,) if may_call and call is not None else ()
    return Thought(open_token=channel, close_token=message, header=said, ends=ends)


def _is_open(kind: str, request: ChatRequest, prompt: Sequence[int], codec: TextCodec) -> bool | None:
    """Whether the prompt ends within a thought; None if it ends behind one, or within an answer."""
    begin, end = MARKERS[kind]
    if request.continue_final_message:
        said = request.messages[-1].content
        if said.rfind(begin) > said.rfind(end):
            return True
        return None if said else False
    last = codec.decode(list(prompt[-_MARK_TOKENS:]), skip_special_tokens=False).rstrip()
    return None if last.endswith(end) else last.endswith(begin)
