"""Calls of tools in a model's output: from text that arrives in pieces to text and calls.

What comes out does not depend on how the text was cut into pieces, so a client that puts the deltas of a
stream together has the calls of the whole answer. A call is told once it is certain that it is one, by the
name of a tool that there is and the beginning of its arguments; anything else stays the text it is, so that
nothing is lost. Arguments are told as they are written. A call that is told stays one if its arguments turn
out to be no JSON, or are cut off: what was sent cannot be taken back, and clients check what models write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from deployments import harmony
from deployments.cohere_calls import CohereCalls, written_cohere_call
from deployments.deepseek_calls import DeepseekCalls, written_deepseek_call
from deployments.functionary_calls import FunctionaryCalls, written_functionary_call
from deployments.gemma_calls import GemmaCalls, written_gemma_call
from deployments.glm_calls import GlmCalls, written_glm_call
from deployments.harmony_calls import HarmonyCalls, written_harmony_call
from deployments.json_calls import JsonCalls
from deployments.kimi_calls import KimiCalls, kimi_ids, written_kimi_call
from deployments.marked_calls import (
    GigaChatCalls,
    GraniteCalls,
    HermesCalls,
    HunyuanCalls,
    MarkedCalls,
    NemotronCalls,
    PhiCalls,
    written_call_object,
)
from deployments.mistral_calls import MistralCalls
from deployments.python_calls import OlmoCalls, PythonCalls, written_python_call
from deployments.qwen_coder_calls import MiniMaxCalls, QwenCoderCalls, SeedCalls
from deployments.tagged_values import Schemas
from deployments.tool_calls import NewId, ToolParser, json_text, mistral_id, openai_id

#: Name and arguments of a call; arguments that are no object stand as the text they are.
Written = Callable[[str, Mapping[str, Any] | str], str]


@dataclass(frozen=True)
class CallForm:
    """How a kind of model writes a call.

    Attributes:
        parser: makes the parser of such calls of functions by their schemas, telling so many at most.
        written: a call in that form.
        words: the form in the words a model is told it when its template cannot tell it.
    """

    parser: Callable[[Schemas, int | None], ToolParser]
    written: Written
    words: str


def _marked(form: type[MarkedCalls], before: str = "", after: str = "") -> CallForm:
    """Objects, or a list where brackets stand around."""

    def written(name: str, arguments: Mapping[str, Any] | str) -> str:
        return f"{form.OPEN}{before}{written_call_object(name, arguments)}{after}{form.CLOSE}"

    call = '{"name": <function name>, "arguments": <arguments object>}'
    words = f"{form.OPEN}{before}{call}{after}{form.CLOSE}"
    return CallForm(form, written, words)


def _in_tags(form: type[QwenCoderCalls]) -> CallForm:
    return CallForm(
        form,
        form.written,
        f"{form.written('NAME', {'KEY': 'VALUE'})}, with as many parameters as there are arguments",
    )


_MORE = "with as many keys and values as there are arguments"

#: By `target.tool_parser`.
FORMS: dict[str, CallForm] = {
    "cohere": CallForm(
        CohereCalls,
        written_cohere_call,
        f'{CohereCalls.OPEN}[{{"tool_call_id": "0", "tool_name": <function name>, '
        f'"parameters": <arguments object>}}]{CohereCalls.CLOSE}',
    ),
    "deepseek_v3": CallForm(
        DeepseekCalls,
        written_deepseek_call,
        f"{written_deepseek_call('NAME', 'ARGUMENTS')}, with the arguments as a JSON object",
    ),
    "functionary_v3": CallForm(
        FunctionaryCalls,
        written_functionary_call,
        f"{written_functionary_call('NAME', 'ARGUMENTS')}, with the arguments as a JSON object",
    ),
    "gemma4": CallForm(
        GemmaCalls,
        written_gemma_call,
        f"{written_gemma_call('NAME', {'KEY': 'VALUE'})}, {_MORE}",
    ),
    "gigachat3": _marked(GigaChatCalls),
    "glm": CallForm(
        GlmCalls,
        written_glm_call,
        f"{written_glm_call('NAME', {'KEY': 'VALUE'})}, {_MORE}",
    ),
    "granite": _marked(GraniteCalls, "[", "]"),
    "harmony": CallForm(
        HarmonyCalls,
        lambda name, arguments: written_harmony_call(
            name, arguments if isinstance(arguments, str) else json_text(arguments)
        ),
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>, with "
        "the arguments as a JSON object",
    ),
    "hermes": _marked(HermesCalls, "\n", "\n"),
    "hunyuan_a13b": _marked(HunyuanCalls, "[", "]"),
    "json": CallForm(
        JsonCalls,
        partial(written_call_object, key="parameters"),
        '{"name": <function name>, "parameters": <arguments object>}',
    ),
    "kimi_k2": CallForm(
        lambda schemas, most: KimiCalls(schemas, most, kimi_ids(0)),
        written_kimi_call,
        f"{written_kimi_call('NAME', 'ARGUMENTS')}, with the arguments as a JSON object and all calls of the "
        "conversation counted from 0",
    ),
    "minimax_m2": _in_tags(MiniMaxCalls),
    "mistral": CallForm(
        MistralCalls,
        lambda name, arguments: f"{MistralCalls.OPEN} [{written_call_object(name, arguments)}]",
        '[TOOL_CALLS] [{"name": <function name>, "arguments": <arguments object>}]',
    ),
    "nemotron": _marked(NemotronCalls, "[", "]"),
    "olmo3": CallForm(
        OlmoCalls,
        lambda name, arguments: f"{OlmoCalls.OPEN}{written_python_call(name, arguments)}{OlmoCalls.CLOSE}",
        f"{OlmoCalls.OPEN}NAME(KEY=VALUE, ...){OlmoCalls.CLOSE}, with the values in Python",
    ),
    "phi4_mini": _marked(PhiCalls, "[", "]"),
    "pythonic": CallForm(
        PythonCalls,
        lambda name, arguments: f"[{written_python_call(name, arguments)}]",
        "[NAME(KEY=VALUE, ...)], with the values in Python",
    ),
    "qwen3_coder": _in_tags(QwenCoderCalls),
    "seed_oss": _in_tags(SeedCalls),
}


def make_parser(kind: str, schemas: Schemas, most: int | None = None) -> ToolParser:
    """The parser of that kind (of `FORMS`) for functions `schemas`, telling at most `most` calls."""
    return FORMS[kind].parser(schemas, most)


def new_id_of(kind: str, num_earlier: int = 0) -> NewId:
    """How ids of calls are made for a model that writes them so: its template may demand a form.

    There are so many earlier calls in the conversation.
    """
    if kind == "kimi_k2":
        return kimi_ids(num_earlier)
    return mistral_id if kind == "mistral" else openai_id


# Marks that no other form has, in the order in which they are looked for in a template.
_SHOWN_BY = {
    MiniMaxCalls.OPEN: "minimax_m2",
    CohereCalls.OPEN: "cohere",
    KimiCalls.SEPARATOR: "kimi_k2",
    GigaChatCalls.OPEN: "gigachat3",
    GemmaCalls.CALL + "call:": "gemma4",
    DeepseekCalls.CALL: "deepseek_v3",
    NemotronCalls.OPEN: "nemotron",
    OlmoCalls.OPEN: "olmo3",
    MistralCalls.OPEN: "mistral",
    PhiCalls.CLOSE: "phi4_mini",
    "<|/tool|>": "phi4_mini",  # around the tools; of calls its template shows nothing
    GraniteCalls.OPEN: "granite",
}
# Llama 3's words, not those in which tools are told, which also have a description.
_JSON_CALL = re.compile(r'\{"name":(?:(?!"description")[\s\S]){0,99}"parameters"')
# As `[get_weather(city="Paris")]` of Llama 4 and Gemma 3.
_PYTHON_CALL = re.compile(r"\[\w+\(\w+=")


def kind_for_template(template: str) -> str:
    """How a model with that chat template writes calls, "none" if it shows no way that is read here."""
    if QwenCoderCalls.FUNCTION in template:  # within the tags of Hermes; Functionary has JSON in its own
        if QwenCoderCalls.PARAMETER not in template:
            return "functionary_v3"
        return "seed_oss" if SeedCalls.OPEN in template else "qwen3_coder"
    if harmony.SHOWN_BY in template:
        return "harmony" if harmony.FUNCTIONS in template else "none"
    if HunyuanCalls.OPEN + "[" in template:  # Apriel's speaks of `<tool_call>`, too
        return "hunyuan_a13b"
    if HermesCalls.OPEN in template and MiniMaxCalls.FUNCTION not in template:
        return "glm" if GlmCalls.KEY in template else "hermes"
    for mark, kind in _SHOWN_BY.items():
        if mark in template:
            return kind
    if "tools" in template and _PYTHON_CALL.search(template):
        return "pythonic"
    return "json" if "tools" in template and _JSON_CALL.search(template) else "none"
