"""A format beside tools: an answer is calls of these, or text of that format, and nothing else."""

from __future__ import annotations

import json
import re
from functools import cache, partial
from typing import Any

import pytest
from tokenizers import AddedToken

from deployments.call_grammar import calls_or
from deployments.cohere_calls import CohereCalls
from deployments.deepseek_calls import DeepseekCalls
from deployments.gemma_calls import GemmaCalls
from deployments.kimi_calls import KimiCalls
from deployments.marked_calls import PhiCalls
from deployments.python_calls import OlmoCalls
from deployments.qwen_coder_calls import MiniMaxCalls
from deployments.text_codec import TextCodec
from deployments.tool_parsers import FORMS, make_parser
from engine.constraint import Constraint, Thought
from engine.grammar import Grammars, make_tokenizer
from engine.mask_bits import holds
from engine.matcher import Matcher
from engine.thoughtful_grammar import matcher_of
from tests.fakes import tiny_tokenizer
from tests.fakes.tiny_tokenizer import codec, ids

FORMAT = {
    "type": "object",
    "properties": {"answer": {"type": "string"}},
    "required": ["answer"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any] | None] = {"get_weather": WEATHER, "now": None, "find": {"type": "object"}}
AS_JSON = Constraint(kind="json_schema", text=json.dumps(FORMAT))
GLM = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
MARKERS = (*GLM, "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>")
MARKERS += (
    *DeepseekCalls.markers,
    *GemmaCalls.markers,
    *PhiCalls.markers,
    *MiniMaxCalls.markers,
    *CohereCalls.markers,
)
MARKERS += KimiCalls.markers
ANSWERS = ('{"answer": "It rains."}', '{"answer":""}')
NEITHER = ("Well, ", "\n", '{"answer": 1', '{"answer": "x"} ', "[", "<tool_call>\n\n", "<tool_call>{'")


@cache
def marked() -> TextCodec:
    """A tokenizer in which all models' marks are tokens."""
    made = tiny_tokenizer.tokenizer.__wrapped__()
    for marker in MARKERS:
        made.add_tokens([AddedToken(marker, special="TOOL" in marker, normalized=False)])
    return TextCodec(made)


@cache
def grammars(tokenizer: TextCodec) -> Grammars:
    ends = sorted(tokenizer.eos_ids)
    return Grammars(partial(make_tokenizer, tokenizer.tokenizer_json(), ends, 512), vocab_size=512)


def may_be(constraint: Constraint, text: str, tokenizer: TextCodec, *, ends: bool = True) -> bool:
    """Whether a text may be the answer, or its beginning."""
    matcher = Matcher(grammars(tokenizer), constraint)
    for token in [*tokenizer.encode(text, add_special_tokens=False), *(tokenizer.eos_ids if ends else ())]:
        if not holds(matcher.allowed(), token):
            return False
        matcher.advance([token])
    return True


def weather(key: str, arguments: str = '{"city": "Oslo"}') -> str:
    return f'{{"name": "get_weather", "{key}": {arguments}}}'


def in_tags(*arguments: str, name: str = "get_weather") -> str:
    lines = [f"<parameter={one}\n</parameter>\n" for one in arguments]
    return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"


def glm(*arguments: tuple[str, str], name: str = "get_weather", between: str = "\n") -> str:
    key, key_end, value, value_end = GLM
    tags = [tag for one, text in arguments for tag in (key + one + key_end, value + text + value_end)]
    return "<tool_call>" + between.join([name, *tags, "</tool_call>"])


def deepseek(*calls: tuple[str, str], bare: bool = False) -> str:
    opened, closed, begun, ended, separator = DeepseekCalls.markers
    made = [
        f"{begun}{name}{separator}{arguments}{ended}"
        if bare
        else f"{begun}function{separator}{name}\n```json\n{arguments}\n```{ended}"
        for name, arguments in calls
    ]
    return opened + "\n".join(made) + closed


def cohere(*calls: tuple[str, str], between: str = ",\n    ", numbered: bool = True) -> str:
    made = [
        f'{{"tool_call_id": "{number}", "tool_name": "{name}", "parameters": {arguments}}}'
        for number, (name, arguments) in enumerate(calls)
    ]
    text = f"<|START_ACTION|>[\n    {between.join(made)}\n]<|END_ACTION|>"
    return text if numbered else re.sub(r'"tool_call_id": "[0-9]", ', "", text)


def kimi(*ids: str, arguments: str = "{}") -> str:
    opened, closed, begun, ended, separator = KimiCalls.markers
    return opened + "".join(f"{begun}{one}{separator}{arguments}{ended}" for one in ids) + closed


def forms(kind: str) -> tuple[list[str], list[str], list[str]]:
    """Of a kind whose arguments are no JSON: as of `CALLS`."""
    call = FORMS[kind].written
    city, now, two = (
        call("get_weather", {"city": "Oslo <east>"}),
        call("now", {}),
        call("find", {"a": "", "b": 1}),
    )
    joint = {"pythonic": city[:-1] + ", " + now[1:], "gemma4": city + now}.get(kind, city + "\n" + now)
    if kind in ("minimax_m2", "olmo3"):  # a mark around all calls
        form = MiniMaxCalls if kind == "minimax_m2" else OlmoCalls
        begin = f"{form.OPEN}\n" if kind == "minimax_m2" else form.OPEN
        joint = city.removesuffix(form.CLOSE).rstrip() + "\n" + now.removeprefix(begin)
    none = [call("get_weather", {"town": "Oslo"}), call("now", {"at": 1}), call("later", {}), now + " Then"]
    return [city, now, two], [joint], none


def hermes(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


#: By kind: one call in the ways it may be written; two; what is none.
CALLS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "hermes": (
        [hermes(weather("arguments")), hermes('{"name":"now","arguments":{}}')],
        [hermes(weather("arguments")) + "\n" + hermes('{"name": "now", "arguments": {}}')],
        [
            hermes(weather("parameters")),
            hermes(weather("arguments", '{"town": "Oslo"}')),
            hermes('{"name": "now", "arguments": {"at": 1}}'),
            hermes('{"name": "later", "arguments": {}}'),
            hermes(weather("arguments")) + " It rains.",
            "I will look. " + hermes(weather("arguments")),
        ],
    ),
    "json": (
        [weather("parameters"), '{"name":"find","parameters":{"what":[1]}}'],
        [weather("parameters") + "; " + weather("parameters")],
        [weather("arguments"), weather("parameters", "{}"), '{"name": "later", "parameters": {}}'],
    ),
    "mistral": (
        [
            f"[TOOL_CALLS] [{weather('arguments')}]",
            '[TOOL_CALLS]get_weather{"city": "Oslo"}',
            "[TOOL_CALLS]now{}",
        ],
        [
            f"[TOOL_CALLS] [{weather('arguments')}, {weather('arguments')}]",
            '[TOOL_CALLS]now{}[TOOL_CALLS]get_weather{"city": "Oslo"}',
        ],
        [
            "[TOOL_CALLS]later{}",
            '[TOOL_CALLS]get_weather{"town": 1}',
            "[TOOL_CALLS] []",
            "[TOOL_CALLS]now{} then",
        ],
    ),
    "glm": (
        [
            glm(("city", "Oslo <east>\n")),
            glm(("city", "Oslo"), between=""),
            glm(name="now"),
            glm(("a", ""), name="find"),
        ],
        [glm(("city", "Oslo")) + "\n" + glm(name="now"), glm(name="now") + glm(name="now")],
        [glm(("town", "Oslo")), glm(("at", "1"), name="now"), glm(name="later"), glm() + " Then"],
    ),
    "qwen3_coder": (
        [in_tags("city>\nOslo\n<east>"), in_tags(name="now"), in_tags("a>\n1", "b>\n", name="find")],
        [in_tags("city>\nOslo") + "\n" + in_tags(name="now")],
        [in_tags("town>\nOslo"), in_tags("at>\n1", name="now"), in_tags(name="later"), in_tags() + " Then"],
    ),
    "deepseek_v3": (
        [
            deepseek(("get_weather", '{"city": "Oslo"}')),
            deepseek(("now", "{}"), bare=True),
            deepseek(("find", '{"a": [1]}')),
        ],
        [deepseek(("now", "{}"), ("get_weather", '{"city": "Oslo"}'))],
        [
            deepseek(("later", "{}")),
            deepseek(("get_weather", '{"town": 1}'), bare=True),
            deepseek(),
            deepseek(("now", "{}")) + " Then",
        ],
    ),
    "cohere": (
        [
            cohere(("get_weather", '{"city": "Oslo"}')),
            cohere(("now", "{}"), numbered=False),
            '<|START_ACTION|>[{"tool_name":"find","parameters":{"a": [1]}}]<|END_ACTION|>',
        ],
        [
            cohere(("now", "{}"), ("get_weather", '{"city": "Oslo"}')),
            cohere(("now", "{}"), ("now", "{}"), between=", ", numbered=False),
        ],
        [
            cohere(("later", "{}")),
            cohere(("get_weather", '{"town": 1}')),
            cohere(),
            cohere(("now", "{}")) + " Then",
            f"<|START_ACTION|>[{weather('parameters')}]<|END_ACTION|>",
        ],
    ),
    "functionary_v3": (
        ['<function=get_weather>{"city": "Oslo"}</function>', "<function=find>{}</function>"],
        ["<function=now>{}</function>\n<function=now>{}</function>", 2 * "<function=now>{}</function>"],
        [
            "<function=later>{}</function>",
            '<function=get_weather>{"town": 1}</function>',
            "<function=now>{}</function> Then",
            "<function=now>",
        ],
    ),
    "gigachat3": (
        [f"<|function_call|>{weather('arguments')}"],
        [f"<|function_call|>[{weather('arguments')}, {weather('arguments')}]"],
        ["<|function_call|>{}", f"<|function_call|>{weather('parameters')}"],
    ),
    "granite": (
        [f"<|tool_call|>[{weather('arguments')}]"],
        [f"<|tool_call|>[{weather('arguments')}, {weather('arguments')}]"],
        [
            "<|tool_call|>[]",
            f"<|tool_call|>[{weather('parameters')}]",
            f"<|tool_call|>[{weather('arguments')}] so",
        ],
    ),
    "hunyuan_a13b": (
        [f"<tool_calls>[{weather('arguments')}]</tool_calls>"],
        [f"<tool_calls>[{weather('arguments')}, {weather('arguments')}]</tool_calls>"],
        ["<tool_calls>[]", f"<tool_calls>[{weather('parameters')}]"],
    ),
    "kimi_k2": (
        [kimi("functions.get_weather:0", arguments='{"city": "Oslo"}'), kimi("functions.now:12")],
        [kimi("functions.now:0", "functions.find:1")],
        [
            kimi("functions.later:0"),
            kimi("functions.now:"),
            kimi("now:0"),
            kimi("functions.get_weather:0", arguments='{"town": 1}'),
            kimi("functions.now:0") + " Then",
            kimi(),
        ],
    ),
    "nemotron": (
        [f"<TOOLCALL>[{weather('arguments')}]</TOOLCALL>"],
        [f"<TOOLCALL>[{weather('arguments')}, {weather('arguments')}]</TOOLCALL>"],
        ["<TOOLCALL>[]", f"<TOOLCALL>[{weather('parameters')}]"],
    ),
    "phi4_mini": (
        [
            f"<|tool_call|>[{weather('arguments')}]<|/tool_call|>",
            f"<|tool_call|>{weather('arguments')}<|/tool_call|>",
        ],
        [f"<|tool_call|>[{weather('arguments')},{weather('arguments')}]<|/tool_call|>"],
        ["<|tool_call|>[]", f"<|tool_call|>[{weather('parameters')}]"],
    ),
    **{kind: forms(kind) for kind in ("gemma4", "minimax_m2", "olmo3", "pythonic", "seed_oss")},
}


@pytest.mark.parametrize("is_marked", [True, False])
@pytest.mark.parametrize("kind", CALLS)
def test_an_answer_is_calls_or_of_the_format_and_nothing_else(kind: str, is_marked: bool) -> None:
    tokenizer = marked() if is_marked else codec()
    one, two, none = CALLS[kind]
    free = calls_or(AS_JSON, kind, SCHEMAS, tokenizer.single_token)
    alone = calls_or(AS_JSON, kind, SCHEMAS, tokenizer.single_token, parallel=False)
    for text in (*ANSWERS, *one):
        assert may_be(free, text, tokenizer), text
        assert may_be(alone, text, tokenizer), text
    for text in two:
        assert may_be(free, text, tokenizer), text
        assert not may_be(alone, text, tokenizer, ends=False), text
    for text in (*NEITHER, *none):
        assert not may_be(free, text, tokenizer, ends=False) or not may_be(free, text, tokenizer), text


@pytest.mark.parametrize("kind", CALLS)
def test_what_may_be_written_is_read_as_calls(kind: str) -> None:
    one, two, _ = CALLS[kind]
    for text, expected in [*((text, 1) for text in one), *((text, 2) for text in two)]:
        parser = make_parser(kind, SCHEMAS)
        parsed = [parser.feed(text), parser.finish()]
        assert parser.num_calls == expected, text
        assert not "".join(part.content for part in parsed), text
    for text in ANSWERS:
        parser = make_parser(kind, SCHEMAS)
        assert parser.feed(text).content + parser.finish().content == text
        assert parser.num_calls == 0


@pytest.mark.parametrize("answer", [True, {"properties": {"name": {"type": "string"}}}, {"type": "object"}])
def test_a_format_that_looks_like_calls_leaves_both_possible(answer: Any) -> None:
    """A call of the kind `json` begins as any object does, and its words may be the format's, too."""
    form = Constraint(kind="json_schema", text=json.dumps({} if answer is True else answer))
    made = calls_or(form, "json", SCHEMAS, codec().single_token)
    for text in ('{"name": "get_weather"}', '{"name": "get_w", "a": 1}', '{"names": 1}', *CALLS["json"][0]):
        assert may_be(made, text, codec()), text
    assert may_be(made, CALLS["json"][1][0], codec())
    assert not may_be(made, '{"name": 1; ', codec(), ends=False)


def test_references_of_arguments_stay_within_them() -> None:
    city = {"$defs": {"City": {"enum": ["Oslo"]}}, "properties": {"city": {"$ref": "#/$defs/City"}}}
    closed = {"type": "object", "additionalProperties": False, "required": ["city"]}
    schemas = {"one": city | closed, "other": city | closed | {"$id": "https://example.org/own"}}
    for kind, form in (
        ("hermes", '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'),
        ("json", '{{"name": "{}", "parameters": {}}}'),
        ("mistral", "[TOOL_CALLS]{}{}"),
    ):
        made = calls_or(AS_JSON, kind, schemas, codec().single_token)
        for name in schemas:
            assert may_be(made, form.format(name, '{"city": "Oslo"}'), codec()), (kind, name)
            assert not may_be(made, form.format(name, '{"city": "Rome"}'), codec()), (kind, name)


def test_marks_that_models_have_as_tokens_are_these() -> None:
    tokenizer = marked()
    for kind, text in (
        ("mistral", '[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Oslo"}'),
        ("mistral", "[TOOL_CALLS]now[ARGS]{}"),
        ("json", f"<|python_tag|>{weather('parameters')}"),
    ):
        made = calls_or(AS_JSON, kind, SCHEMAS, tokenizer.single_token)
        assert may_be(made, text, tokenizer), text
        # One that has no such token does not write its letters, either.
        assert not may_be(calls_or(AS_JSON, kind, SCHEMAS, codec().single_token), text, codec()), text
        parser = make_parser(kind, SCHEMAS)
        parser.feed(text)
        parser.finish()
        assert parser.num_calls == 1


def test_behind_a_thought_both_are_possible() -> None:
    begin, end = ids("<|user|>")[0], ids("<|system|>")[0]  # stand for the marks
    thought = Thought(open_token=begin, close_token=end)
    made = calls_or(AS_JSON, "hermes", SCHEMAS, codec().single_token)
    form = Constraint(kind="grammar", text=made.text, thought=thought)
    for answer in (ANSWERS[0], hermes(weather("arguments"))):
        matcher = matcher_of(grammars(codec()), form)
        for token in [begin, *ids("hm, "), end, *ids(answer), *codec().eos_ids]:
            assert holds(matcher.allowed(), token), answer
            matcher.advance([token])
