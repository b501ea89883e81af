"""By its chat template a model is taken for one whose calls are read, or for none."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from cluster.parser_names import ReasoningParserName, ToolParserName
from deployments.errors import ApiError
from deployments.reasoning import MARKERS
from deployments.tagged_values import Schemas
from deployments.tool_parsers import FORMS, kind_for_template, make_parser
from deployments.tools import Tool, ToolUse

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
SCHEMAS: Schemas = {"get_weather": PARAMETERS}
CITY = {"city": "Paris"}
CALL = json.dumps({"name": "get_weather", "arguments": CITY})

#: What templates show of calls, and what such a model then writes.
KNOWN = {
    "Qwen2.5, Qwen3, Hermes 2 Pro, Granite 4": (
        "hermes",
        r"""{% if tools %}{{ '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}' }}""",
        f"<tool_call>\n{CALL}\n</tool_call>",
    ),
    "Qwen3-Coder": (
        "qwen3_coder",
        r"""{%- if tools %}{{- '<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>
value_1\n</parameter>\n</function>\n</tool_call>' }}""",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
    ),
    "GLM-4.5, GLM-4.6": (
        "glm",
        "{%- if tools -%}<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n"
        "<arg_value>{arg-value-1}</arg_value>\n...\n</tool_call>{%- endif -%}",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
    ),
    "GLM-4.7": (
        "glm",
        "{%- if tools -%}<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}"
        "</arg_value>...</tool_call>{%- endif -%}",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>",
    ),
    "Llama 3.1 to 3.3, and Llama 4 as first published": (
        "json",
        """{%- if tools is not none %}{{- 'Respond in the format {"name": function name, "parameters": """
        """dictionary of argument name and its value}. ' }}""",
        CALL.replace("arguments", "parameters"),
    ),
    "one with earlier calls alone": (
        "json",
        """{%- if tools %}{{- '{"name": "' + tool_call.name + '", ' }}
            {{- '"parameters": ' }}
            {{- tool_call.arguments | tojson }}""",
        CALL.replace("arguments", "parameters"),
    ),
    "gpt-oss": (
        "harmony",
        """{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
        {{- "<|start|>assistant to=" }}{{- "functions." + tool_call.name + "<|channel|>commentary " }}""",
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{json.dumps(CITY)}",
    ),
    "Mistral Nemo": (
        "mistral",
        """{{- '{"type": "function", "function": {"name": ' }}"parameters": {{- "[TOOL_CALLS][" }}""",
        f"[TOOL_CALLS][{CALL}]",
    ),
    "Llama 4": (
        "pythonic",
        """{%- if tools %}Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]
{%- endif %}{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}""",
        '[get_weather(city="Paris")]',
    ),
    "Gemma 3, as vLLM has it": (
        "pythonic",
        "{%- if tools %}[func_name1(params_name1=params_value1, params_name2=params_value2...)]",
        "[get_weather(city='Paris')]",
    ),
    "Gemma 4": (
        "gemma4",
        "{{- '<|tool_call>call:' + function['name'] + '{' -}}{{- '}<tool_call|>' -}}",
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>',
    ),
    "Nemotron Nano 2, Llama-Nemotron": (
        "nemotron",
        """{% if tools %}<TOOLCALL>[{{"name": "tool_name1", "arguments": "tool_args1"}}]""",
        f"<TOOLCALL>[{CALL}]</TOOLCALL>",
    ),
    "DeepSeek V3, R1": (
        "deepseek_v3",
        "<\uff5ctool\u2581call\u2581begin\uff5c>{{ tool['type'] }}<\uff5ctool\u2581sep\uff5c>",
        "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function"
        f"<\uff5ctool\u2581sep\uff5c>get_weather\n```json\n{json.dumps(CITY)}\n```"
        "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>",
    ),
    "DeepSeek V3.1": (
        "deepseek_v3",
        "<\uff5ctool\u2581call\u2581begin\uff5c>{{ tool['function']['name'] }}<\uff5ctool\u2581sep\uff5c>",
        "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>get_weather"
        f"<\uff5ctool\u2581sep\uff5c>{json.dumps(CITY)}<\uff5ctool\u2581call\u2581end\uff5c>"
        "<\uff5ctool\u2581calls\u2581end\uff5c>",
    ),
    "Phi-4-mini": (
        "phi4_mini",
        "{{ '<|' + message['role'] + '|>' + '<|tool|>' + message['tools'] + '<|/tool|>' }}",
        f"<|tool_call|>[{CALL}]<|/tool_call|>",
    ),
    "Phi-4-mini, as llama.cpp has it": (
        "phi4_mini",
        """{{- 'To use a tool: <|tool_call|>{"name": "foo", "arguments": {"a": 1}}<|/tool_call|>' -}}""",
        f"<|tool_call|>{CALL}<|/tool_call|>",
    ),
    "Hunyuan A13B, Apriel 1.5": (
        "hunyuan_a13b",
        """{%- if tools %}as a list within <tool_call></tool_call> XML tags:
<tool_calls>[{"name": <function-name-1>, "arguments": <args-dict-1>},...]</tool_calls>""",
        f"<tool_calls>[{CALL}]</tool_calls>",
    ),
    "Granite 3.3": (
        "granite",
        "{%- if tools %}respond with <|tool_call|> followed by a JSON list of tools used.",
        f"<|tool_call|>[{CALL}]",
    ),
    "OLMo 3": (
        "olmo3",
        "<functions>{{ tools | tojson }}</functions><function_calls>{{ call }}</function_calls>",
        '<function_calls>get_weather(city="Paris")</function_calls>',
    ),
    "MiniMax-M2": (
        "minimax_m2",
        """{%- set toolcall_begin_token = '<minimax:tool_call>' -%}<invoke name="tool-name-1">
<parameter name="param-key-1">param-value-1</parameter>""",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
    ),
    "Command R7B, Command A": (
        "cohere",
        """{% for tool in tools %}
    {"name": "{{ tool['name'] }}", "description": "{{ d }}", "parameters": {{ p }}, "responses": null}
{% endfor %}<|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "{{ name }}", "parameters": {{ arguments }}}
]<|END_ACTION|>""",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        f"{json.dumps(CITY)}}}\n]<|END_ACTION|>",
    ),
    "Kimi K2": (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>{{ formatted_id }}<|tool_call_argument_begin|>"
        "{{ tool_call['function']['arguments'] | tojson }}<|tool_call_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{json.dumps(CITY)}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "Functionary 3.1": (
        "functionary_v3",
        r"""{%- if tools %}{{- '<{start_tag}={function_name}>{parameters}{end_tag}\n
<function=example_function_name>{"example_name": "example_value"}</function>' }}""",
        f"<function=get_weather>{json.dumps(CITY)}</function>",
    ),
    "GigaChat 3.1": (
        "gigachat3",
        """{%- set add_tokens = namespace(function_call="<|function_call|>") -%}
{{- '{"name": "' ~ call['name'] ~ '", "arguments": ' ~ arguments ~ '}' -}}""",
        f"<|function_call|>{CALL}",
    ),
    "Seed-OSS": (
        "seed_oss",
        """{%- set toolcall_begin_token   = '<seed:tool_call>' -%}{{ "<function=example_function_name>
<parameter=example_parameter_1>value_1</parameter>" }}""",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n"
        "</seed:tool_call>",
    ),
}
UNKNOWN = {
    "MiniMax-M3": """{%- set toolcall_begin_token = ns_token ~ '<tool_call>' -%}
{{- ns_token + '<invoke name="tool-name-1">' }}""",
    "one without tools": "{{ messages[0].content }}",
}


def test_every_form_and_mark_can_be_configured() -> None:
    assert set(get_args(ToolParserName)) == {"auto", "none", *FORMS}
    assert set(get_args(ReasoningParserName)) == {"auto", "none", "harmony", *MARKERS}
    assert {kind for kind, _, _ in KNOWN.values()} == set(FORMS)


@pytest.mark.parametrize("model", KNOWN)
def test_calls_of_the_template_are_read(model: str) -> None:
    kind, template, written = KNOWN[model]
    assert kind_for_template(template) == kind
    parser = make_parser(kind, SCHEMAS)
    parsed = [parser.feed(written), parser.finish()]
    (call,) = [call for one in parsed for call in one.calls]
    assert (call.name, json.loads(call.arguments)) == ("get_weather", CITY)
    assert not "".join(one.content for one in parsed).strip()


@pytest.mark.parametrize("model", UNKNOWN)
def test_tools_are_refused_where_calls_would_not_be_read(model: str) -> None:
    """Taken for calls that are read, they came back as text."""
    assert kind_for_template(UNKNOWN[model]) == "none"
    tools = [Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": PARAMETERS}})]
    with pytest.raises(ApiError, match="not known how this model writes calls"):
        ToolUse(tools, "auto", kind_for_template(UNKNOWN[model]))
    ToolUse(tools, "required", "none")
