"""Body of `/v1/messages`, Anthropic's API, and the chat request it stands for."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field

from deployments.errors import ApiError, bad_request, in_names, no_trace, without_form
from deployments.messages_blocks import BlockText, FunctionTool, MessagesTool, Turn, as_chat
from deployments.openai_schema import NEUTRAL_VALUES, ChatRequest, CommonFields, validated
from deployments.request_model import DescribedModel, RequestModel
from deployments.schema_values import StopStrings
from deployments.tools import MAX_TOOLS, NAME

#: Fields of this API that this server has no use for, with the values that ask for nothing.
MESSAGES_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "container": (None,),
    "inference_geo": (None,),
    "mcp_servers": (None, []),
    "thread": (None,),
}

#: What Anthropic's client understands: its runner of tools asks for a conversation that the server holds, and
#: goes on without where an error has these.
_NO_THREADS = {"details": {"error_code": "thread_unsupported_request", "unsupported": []}}


class OutputFormat(RequestModel):
    """What the text must look like."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(DescribedModel):
    """How the output is to be; effort is not used."""

    format: OutputFormat | None = None


class Thinking(DescribedModel):
    """Whether to think; for how many tokens is not used."""

    type: Literal["enabled", "adaptive", "disabled"]


class MessagesToolChoice(RequestModel):
    """Which tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, pattern=NAME)
    disable_parallel_tool_use: bool | None = None


class MessagesRequest(CommonFields):
    """Body of `/v1/messages`."""

    messages: list[Turn] = Field(
        min_length=1, max_length=4096, description="The answer goes on with a last one of the assistant."
    )
    max_tokens: int = Field(ge=1, le=1 << 24)
    system: BlockText | None = Field(None, description="A system message in front of the conversation.")
    stop_sequences: StopStrings = ()
    tools: list[MessagesTool] | None = Field(
        None, max_length=MAX_TOOLS, description="Those that the client runs; others are left out."
    )
    tool_choice: MessagesToolChoice | None = None
    output_config: OutputConfig | None = Field(None, description="`format` holds a JSON schema.")
    output_format: OutputFormat | None = Field(None, description="The same, under its earlier name.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")
    metadata: dict[str, Any] | None = Field(None, description="Accepted and not used.")
    thinking: Thinking | None = Field(
        None,
        description="Its type tells the chat template whether to think (`enable_thinking`), unless "
        "`chat_template_kwargs` does.",
    )
    cache_control: dict[str, Any] | None = Field(
        None, description="Accepted and not used: prefixes are shared anyway."
    )
    context_management: dict[str, Any] | None = Field(
        None, description="Accepted and not used: the conversation is read as it is sent."
    )
    diagnostics: dict[str, Any] | None = Field(None, description="Accepted and not used.")
    speed: str | None = Field(None, description="Accepted and not used.")

    @property
    def functions(self) -> list[FunctionTool]:
        """The tools that the model hears of."""
        return [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]


#: Whatever a body may hold.
MESSAGES_FIELDS = MessagesRequest.model_fields.keys() | MESSAGES_NEUTRAL.keys() | NEUTRAL_VALUES.keys()

#: Fields of the same meaning.
_SAME = ("max_tokens", "chat_template_kwargs")


def parse_messages(data: dict[str, Any]) -> ChatRequest:
    """The chat request that answers the one in JSON data; raises `ApiError` (400)."""
    for name in data.keys() & MESSAGES_NEUTRAL.keys():
        value = data.pop(name)
        if not any(value == one and type(value) is type(one) for one in MESSAGES_NEUTRAL[name]):
            message = f"`{name}` is not supported here; leave it out."
            details = _NO_THREADS if name == "thread" else None
            raise ApiError(400, message, param=name, code="unsupported_parameter", details=details)
    if data.get("service_tier") == "standard_only":  # there is nothing else to be had
        del data["service_tier"]
    try:
        request = validated(dict(data), MessagesRequest)
    except ApiError as error:
        raise without_form(error, _FORM) from None
    if request.speculation is not None and request.speculation.trace:
        raise no_trace()
    if request.stop and request.stop_sequences:
        raise bad_request("Give `stop_sequences` or `stop`, not both.", "stop")
    common = CommonFields.model_fields.keys() - {"metadata"}
    chat: dict[str, Any] = {name: data[name] for name in common | set(_SAME) if name in data}
    chat["messages"] = _conversation(request)
    if request.thinking is not None:
        thinks = {"enable_thinking": request.thinking.type != "disabled"}
        chat["chat_template_kwargs"] = thinks | (request.chat_template_kwargs or {})
    if request.stop_sequences:
        chat["stop"] = list(request.stop_sequences)
    last = chat["messages"][-1]
    if last["role"] == "assistant" and "tool_calls" not in last:
        chat["continue_final_message"] = True
    if request.functions:
        chat["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                },
            }
            for tool in request.functions
        ]
    if request.tool_choice is not None:
        chat |= _tool_choice(request.tool_choice)
    if (wanted := _output_format(request)) is not None:
        chat["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": wanted.schema_},
        }
    try:
        return validated(chat, ChatRequest)
    except ApiError as error:
        raise renamed(error) from None


def _conversation(request: MessagesRequest) -> list[dict[str, Any]]:
    messages = as_chat(request.messages)
    if request.system:
        messages.insert(0, {"role": "system", "content": request.system})
    if not messages:
        raise bad_request("`messages` hold nothing that this model reads.", "messages")
    return messages


def _tool_choice(choice: MessagesToolChoice) -> dict[str, Any]:
    """The chat's fields; raises `ApiError` (400) for a tool that has no name, or a name without one."""
    if (choice.type == "tool") != (choice.name is not None):
        raise bad_request(
            '`tool_choice.name` belongs to the type "tool", and to no other.', "tool_choice.name"
        )
    if choice.name is not None:
        made: Any = {"type": "function", "function": {"name": choice.name}}
    else:
        made = "required" if choice.type == "any" else choice.type
    return {"tool_choice": made, "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _output_format(request: MessagesRequest) -> OutputFormat | None:
    newer = request.output_config.format if request.output_config is not None else None
    if newer is not None and request.output_format is not None:
        raise bad_request("Give `output_config.format` or `output_format`, not both.", "output_format")
    return newer or request.output_format


#: This API's names for fields of the chat request that errors may name. What is inside them is another thing.
_NAMES = {
    "messages": "messages",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "tool_choice": "tool_choice",
    "tools": "tools",
}


def renamed(error: ApiError) -> ApiError:
    """An error about the chat request, told in this API's names."""
    return in_names(error, _NAMES)


#: Pydantic's paths go through the name of the form that a thing has, which the JSON has not.
_FORM = re.compile(
    r"^(messages\.\d+\.content\.\d+|tools\.\d+)\.(?:text|tool_use|tool_result|thinking|custom|other)(?=\.|$)"
)
