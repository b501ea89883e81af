"""Conversations that `flotilla bench vllm answers` asks to go on with, by what is in the request."""

from __future__ import annotations

from typing import Any

from benchmarks.vllm_completion_requests import SCHEMA
from benchmarks.vllm_peer import ADAPTER_NAME

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Tell me about the sea."}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {"where": {"type": "string", "maxLength": 8}},
            "required": ["where"],
        },
    },
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


CHATS: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "max_completion_tokens": {"max_completion_tokens": 4},
    "both bounds": {"max_completion_tokens": 4, "max_tokens": 8},
    "a system message": {"messages": [{"role": "system", "content": "Be brief."}, *HELLO]},
    "a developer's message": {"messages": [{"role": "developer", "content": "Be brief."}, *HELLO]},
    "parts of text": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "Tell me"}, {"type": "text", "text": "more."}],
            }
        ]
    },
    "an image": {"messages": [{"role": "user", "content": [IMAGE]}]},
    "an earlier answer": {"messages": [*HELLO, {"role": "assistant", "content": "It is wet."}, *HELLO]},
    "an answer without content": {"messages": [*HELLO, {"role": "assistant", "content": None}, *HELLO]},
    "a name": {"messages": [{"role": "user", "content": "Hello", "name": "me"}]},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "top_logprobs without logprobs": {"top_logprobs": 2},
    "top_logprobs 100": {"logprobs": True, "top_logprobs": 100},
    "prompt_logprobs": {"prompt_logprobs": 0},
    "return_token_ids": {"return_token_ids": True},
    "two choices": {"n": 2, "temperature": 1, "top_k": 1},
    "stop": {"stop": ["a"]},
    "stop_token_ids": {"stop_token_ids": [13]},
    "continue_final_message": {
        "messages": [*HELLO, {"role": "assistant", "content": "The sea"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "both ways to end the prompt": {
        "messages": [*HELLO, {"role": "assistant", "content": "The sea"}],
        "continue_final_message": True,
        "add_generation_prompt": True,
    },
    "add_generation_prompt off": {"add_generation_prompt": False},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 5},
    "truncate_prompt_tokens, right": {"truncate_prompt_tokens": 5, "truncation_side": "right"},
    "a tool that may be called": {"tools": [TOOL]},
    "echo": {"echo": True},
    "echo of what is continued": {
        "messages": [*HELLO, {"role": "assistant", "content": "The sea"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "echo": True,
    },
    "echo as a stream": {
        "messages": [*HELLO, {"role": "assistant", "content": "The sea"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "echo": True,
        "stream": True,
    },
    "reasoning_effort": {"reasoning_effort": "low"},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "chat_template": {"chat_template": "{{ messages[0].content }}"},
    "documents": {"documents": [{"title": "a", "text": "b"}]},
    "json_object": {"response_format": {"type": "json_object"}, "max_tokens": 64},
    "json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}},
        "max_tokens": 64,
    },
    "json_schema without a schema": {"response_format": {"type": "json_schema"}},
    "another response_format": {"response_format": {"type": "xml"}},
    "structured choice": {"structured_outputs": {"choice": ["red", "green"]}},
    "tools, none to be called": {"tools": [TOOL], "tool_choice": "none"},
    "tools, one required": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 96},
    "tools, one named": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "max_tokens": 96,
    },
    "tools, one named that is not there": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "see"}},
    },
    "tools, one named, as a stream": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "max_tokens": 96,
        "stream": True,
    },
    "tools, one required, as a stream": {
        "tools": [TOOL],
        "tool_choice": "required",
        "max_tokens": 96,
        "stream": True,
    },
    "tool_choice without tools": {"tool_choice": "required"},
    "no tools": {"tools": []},
    "a call and its result": {
        "messages": [
            *HELLO,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "c",
                        "type": "function",
                        "function": {"name": "look", "arguments": '{"where": "here"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "Nothing."},
        ]
    },
    "arguments that are no JSON": {
        "messages": [
            *HELLO,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{"}}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "Nothing."},
        ]
    },
    "stream": {"stream": True},
    "stream with usage": {"stream": True, "stream_options": {"include_usage": True}},
    "stream with usage throughout": {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    "stream with logprobs": {"stream": True, "logprobs": True, "top_logprobs": 1},
    "stream with ids": {"stream": True, "return_token_ids": True},
    "stream of two choices": {"stream": True, "n": 2, "temperature": 1, "top_k": 1},
    "stream with max_tokens 1": {"stream": True, "max_tokens": 1},
    "no messages": {"messages": []},
    "messages left out": {"messages": None},
    "message without a role": {"messages": [{"content": "Hello"}]},
    "message of another role": {"messages": [{"role": "wizard", "content": "Hello"}]},
    "user without content": {"messages": [{"role": "user"}]},
    "message that is text": {"messages": ["Hello"]},
    "beyond the window": {"messages": [{"role": "user", "content": "sea " * 5000}]},
    "unknown field": {"nonsense": 1},
    "another model": {"model": "nonsense"},
    "a LoRA adapter": {"model": ADAPTER_NAME, "max_tokens": 24},
    "a LoRA adapter, sampled": {"model": ADAPTER_NAME, "temperature": 1.0, "top_k": 1, "max_tokens": 24},
    "a LoRA adapter in a stream": {"model": ADAPTER_NAME, "stream": True},
    "cache_salt": {"cache_salt": "one client's"},
}
