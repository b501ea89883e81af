"""Calls of tools in a model's output: from text that arrives in pieces to text and calls.

What comes out does not depend on how the text was cut into pieces, so a client that puts the deltas of a
stream together has the calls of the whole answer. A call is told once it is certain that it is one, by the
name of a tool that there is and the beginning of its arguments; anything else stays the text it is, so that
nothing is lost. Arguments are told as they are written. A call that is told stays one if its arguments turn
out to be no JSON, or are cut off: what was sent cannot be taken back, and clients check what models write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from deployments import harmony
from deployments.call_objects import CallObjects
from deployments.glm_calls import GlmCalls
from deployments.harmony_calls import HarmonyCalls
from deployments.mistral_calls import MistralCalls
from deployments.qwen_coder_calls import QwenCoderCalls
from deployments.tagged_values import Schemas
from deployments.tool_calls import CallsInText, NewId, Parsed, Teller, ToolParser, mistral_id, openai_id

#: How each kind of model writes a call, in the words it is told when its template cannot tell it.
CallText = {
    "glm": "<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>, with as "
    "many keys and values as there are arguments",
    "harmony": "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>, with "
    "the arguments as a JSON object",
    "hermes": '<tool_call>\n{"name": <function name>, "arguments": <arguments object>}\n</tool_call>',
    "json": '{"name": <function name>, "parameters": <arguments object>}',
    "mistral": '[TOOL_CALLS] [{"name": <function name>, "arguments": <arguments object>}]',
    "qwen3_coder": "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n"
    "</tool_call>, with as many parameters as there are arguments",
}


class HermesCalls(CallsInText):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in a text, as Hermes and Qwen write.

    What is behind `<tool_call>` and is no call is looked at again, as another one may follow in it; so models
    may speak of calls. A call ends with its last bracket: some models leave the closing tag out.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    markers: tuple[str, ...] = (OPEN, CLOSE)

    def __init__(self, names: Collection[str], most: int | None = None) -> None:
        super().__init__(names, most)
        self._objects: CallObjects | None = None
        self._may_close = False

    def finish(self) -> Parsed:
        """See `ToolParser`."""
        parsed = Parsed()
        while self._objects is not None:
            self._objects.finish(parsed)
            self._leave(self._objects, parsed)
            self._take(parsed)
        if not self._may_close:
            self._add_text(self._held, parsed)
        self._held = ""
        return parsed

    def _advance(self, parsed: Parsed) -> bool:
        if self._objects is not None:
            fed, self._held = self._held, ""
            if not self._objects.feed(fed, parsed):
                return False
            self._leave(self._objects, parsed)
        if self._may_close:
            self._may_close = not self._skip_closing(self.CLOSE)
        if self._may_close or not self._find(self.OPEN, parsed):
            return False
        self._objects = CallObjects(self._teller, stop=self.CLOSE)
        return True

    def _leave(self, objects: CallObjects, parsed: Parsed) -> None:
        """Go on behind what began with the marker."""
        self._objects, self._held = None, objects.rest or ""
        self._may_close = self._skips_space = objects.is_certain
        if not objects.is_certain:
            self._add_text(self.OPEN, parsed)


class JsonCalls(CallsInText):
    """An answer that is nothing but calls, `{"name": ..., "parameters": {...}}`, as Llama 3 models write.

    Several are separated by `;` or white space, or are a list. Text that begins in any other way is text.
    """

    TAG = "<|python_tag|>"
    markers: tuple[str, ...] = (TAG,)

    def __init__(
        self,
        names: Collection[str],
        most: int | None = None,
        *,
        has_text: bool = True,
        new_id: NewId = openai_id,
    ) -> None:
        """As `HermesCalls`; without text, as decoding was constrained to calls, only calls are told."""
        super().__init__(names, most, new_id)
        self.has_text = has_text
        self._before = ""  # the calls
        self._objects = CallObjects(self._teller, is_sequence=True, is_forced=not has_text)
        self._began = False

    def finish(self) -> Parsed:
        """See `ToolParser`."""
        parsed = Parsed()
        if self._objects.rest is None:
            self._objects.finish(parsed)
            self._held = self._rest() + self._held
        self._add_text(self._held, parsed)
        self._held = ""
        return parsed

    def _advance(self, parsed: Parsed) -> bool:
        if self._objects.rest is not None:
            self._add_text(self._held, parsed)
            self._held = ""
            return False
        if not self._began:
            following = self._held.lstrip()
            if len(following) < len(self.TAG) and self.TAG.startswith(following):
                return False
            self._began = True
            if following.startswith(self.TAG):
                size = len(self._held) - len(following) + len(self.TAG)
                self._before, self._held = self._held[:size], self._held[size:]
        fed, self._held = self._held, ""
        if not self._objects.feed(fed, parsed):
            return False
        self._held = self._rest()
        return True

    def _rest(self) -> str:
        self._skips_space = self._objects.is_certain
        return (self._objects.rest or "") if self._skips_space else self._before + (self._objects.rest or "")

    def _add_text(self, text: str, parsed: Parsed) -> None:
        if self.has_text:
            super()._add_text(text, parsed)


class NamedCall:
    """An answer that is nothing but the arguments of one call; each piece of it is told as it comes."""

    markers: tuple[str, ...] = ()
    is_forced = True
    has_text = False

    def __init__(self, name: str, new_id: NewId = openai_id) -> None:
        self._name = name
        self._teller = Teller((name,), None, new_id)

    @property
    def num_calls(self) -> int:
        """See `ToolParser`."""
        return self._teller.num_calls

    def feed(self, text: str) -> Parsed:
        """See `ToolParser`."""
        parsed = Parsed()
        if self.num_calls:
            self._teller.more(text, parsed)
        elif text:
            self._teller.begin(self._name, text, parsed)
        return parsed

    def finish(self) -> Parsed:
        """See `ToolParser`."""
        return Parsed()


_PARSERS: dict[str, Callable[[Schemas, int | None], ToolParser]] = {
    "glm": GlmCalls,
    "harmony": HarmonyCalls,
    "hermes": HermesCalls,
    "json": JsonCalls,
    "mistral": MistralCalls,
    "qwen3_coder": QwenCoderCalls,
}


def make_parser(kind: str, schemas: Schemas, most: int | None = None) -> ToolParser:
    """The parser of that kind (of `CallText`) for functions `schemas`, telling at most `most` calls."""
    return _PARSERS[kind](schemas, most)


def new_id_of(kind: str) -> NewId:
    """How ids of calls are made for a model that writes them so: its template may demand a form."""
    return mistral_id if kind == "mistral" else openai_id


# Llama 3's words, not those in which tools are told, which also have a description.
_JSON_CALL = re.compile(r'\{"name":(?:(?!"description")[\s\S]){0,99}"parameters"')
# As `[get_weather(city="Paris")]` of Llama 4 and Gemma 3.
_PYTHON_CALL = re.compile(r"\[\w+\(\w+=")


def kind_for_template(template: str) -> str:
    """How a model with that chat template writes calls, "none" if it shows no way that is read here."""
    if QwenCoderCalls.FUNCTION in template:  # within the tags of Hermes; Functionary has JSON in its own
        return "qwen3_coder" if QwenCoderCalls.PARAMETER in template else "none"
    if harmony.SHOWN_BY in template:
        return "harmony" if harmony.FUNCTIONS in template else "none"
    if HermesCalls.OPEN in template:
        return "glm" if GlmCalls.KEY in template else "hermes"
    if MistralCalls.OPEN in template:
        return "mistral"
    if "tools" in template and _JSON_CALL.search(template) and not _PYTHON_CALL.search(template):
        return "json"
    return "none"
