"""Body of `/v1/responses`, and the chat request it stands for.

Nothing is stored between requests, so what refers to an earlier response is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from deployments.errors import ApiError, bad_request, in_names, no_trace, without_form
from deployments.openai_schema import NEUTRAL_VALUES, ChatRequest, CommonFields, validated
from deployments.request_model import DescribedModel, RequestModel
from deployments.responses_items import (
    FORM,
    CallableFunction,
    InputCall,
    InputCallOutput,
    InputReasoning,
    ResponseFunction,
    ResponseNamespace,
    ResponseTool,
    checked,
    full_name,
)
from deployments.schema_values import MAX_LOGPROBS
from deployments.tools import MAX_TOOLS, NAME


class TextFormat(RequestModel):
    """What the text must look like, in this API's flat form."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(RequestModel):
    """How the text is to be."""

    format: TextFormat | None = None
    verbosity: str | None = Field(None, description="Accepted and not used.")


class ResponsesStreamOptions(RequestModel):
    """Accepted and not used."""

    include_obfuscation: bool | None = None


#: Fields of this API that this server has no use for, with the values that ask for nothing.
RESPONSES_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "access_programs": (None,),
    "background": (None, False),
    "background_options": (None,),
    "context_management": (None, []),
    "conversation": (None,),
    "image": (None,),
    "max_tool_calls": (None,),
    "moderation": (None,),
    "previous_response_id": (None,),
    "prompt": (None,),
}

#: Those that only a count of an input's tokens knows.
COUNT_NEUTRAL: dict[str, tuple[Any, ...]] = {"personality": (None,)}

#: Why the others cannot be had.
_REASONS = {
    "previous_response_id": "this server stores no responses; send the conversation as `input`",
    "conversation": "this server stores no conversations; send them as `input`",
    "background": "responses are answered while the client waits",
}


def _text_or_items(value: Any) -> Any:
    """One message for both forms."""
    if not isinstance(value, str | list):
        raise PydanticCustomError("input_type", "must be a string or a list of items")
    return value


#: For /openapi.json: what is looked at by hand, for the sake of its errors.
_INPUT = WithJsonSchema(
    {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "minItems": 1, "maxItems": 4096, "items": {"type": "object"}},
        ]
    }
)
_NAMED_FUNCTION = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "name": {"type": "string", "pattern": NAME}},
    "required": ["type", "name"],
    "additionalProperties": False,
}
_TOOL_CHOICE = WithJsonSchema(
    {
        "anyOf": [
            {"enum": ["none", "auto", "required"]},
            _NAMED_FUNCTION,
            {
                "type": "object",
                "properties": {
                    "type": {"const": "allowed_tools"},
                    "mode": {"enum": ["auto", "required"]},
                    "tools": {
                        "type": "array",
                        "items": _NAMED_FUNCTION,
                        "minItems": 1,
                        "maxItems": MAX_TOOLS,
                    },
                },
                "required": ["type", "mode", "tools"],
                "additionalProperties": False,
            },
            {"type": "null"},
        ]
    }
)


#: What may be asked for besides, by OpenAI's names. All but the log-probabilities is of what this server does
#: not have (tools that it would run, images, encrypted thoughts), so that there is nothing to add of it.
Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class Reasoning(DescribedModel):
    """How to reason; a summary is not made."""

    effort: str | None = Field(None, max_length=64)


class ResponsesRequest(CommonFields):
    """Body of `/v1/responses`."""

    input: Annotated[str | list[Any], BeforeValidator(_text_or_items), _INPUT] = Field(
        description="Text, or items: messages, calls, and what calls returned."
    )
    instructions: str | None = Field(None, description="A system message in front of the input.")
    max_output_tokens: int | None = Field(None, ge=1, le=1 << 24)
    text: TextOptions | None = None
    tools: list[ResponseTool] | None = Field(
        None, max_length=MAX_TOOLS, description="Functions, also in namespaces; other tools are left out."
    )
    tool_choice: Annotated[Any, _TOOL_CHOICE] = Field(
        None,
        description="none, auto, required, {type: function, name}, or {type: allowed_tools, mode, tools}.",
    )
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: list[Includable] | None = Field(
        None, max_length=16, description="Log-probabilities in the answer; there is nothing of the others."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="`auto` drops the beginning of a prompt that does not fit."
    )
    reasoning: Reasoning | None = Field(
        None, description="`effort` goes to the chat template, as `reasoning_effort` of a chat does."
    )
    client_metadata: dict[str, Any] | None = Field(None, description="Accepted and not used.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")
    stream_options: ResponsesStreamOptions | None = None

    @property
    def heard(self) -> list[ResponseFunction | ResponseNamespace]:
        """The tools that the model hears of."""
        told: list[ResponseFunction | ResponseNamespace] = []
        for tool in self.tools or ():
            if isinstance(tool, ResponseNamespace) and tool.functions:
                told.append(tool.model_copy(update={"tools": tool.functions}))
            elif isinstance(tool, ResponseFunction):
                told.append(tool)
        return told

    @property
    def functions(self) -> list[CallableFunction]:
        """What the model may call."""
        found: list[CallableFunction] = []
        for tool in self.heard:
            if isinstance(tool, ResponseNamespace):
                found += [CallableFunction(function, tool.name) for function in tool.functions]
            else:
                found.append(CallableFunction(tool))
        return found

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's text has log-probabilities."""
        return self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ())


#: Whatever a body may hold.
RESPONSES_FIELDS = ResponsesRequest.model_fields.keys() | RESPONSES_NEUTRAL.keys() | NEUTRAL_VALUES.keys()


def parse_responses(data: dict[str, Any]) -> tuple[ResponsesRequest, ChatRequest]:
    """The request in JSON data, and the chat request that answers it; raises `ApiError` (400)."""
    _take_out(data, RESPONSES_NEUTRAL)
    try:
        request = validated(dict(data), ResponsesRequest)
    except ApiError as error:
        raise without_form(error, FORM) from None
    if request.speculation is not None and request.speculation.trace:
        raise no_trace()
    chat: dict[str, Any] = {name: data[name] for name in CommonFields.model_fields if name in data}
    chat["messages"] = _messages(request, data["input"])
    if request.truncation == "auto":
        chat.setdefault("truncate_prompt_tokens", -1)
    for ours, theirs in _SAME.items():
        if data.get(ours) is not None:
            chat[theirs] = data[ours]
    if request.reasoning is not None and request.reasoning.effort is not None:
        chat["reasoning_effort"] = request.reasoning.effort
    if request.wants_logprobs:
        chat |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if functions := request.functions:
        chat["tools"] = [{"type": "function", "function": function.told()} for function in functions]
    if request.tool_choice is not None:
        chat["tool_choice"] = _tool_choice(request.tool_choice)
    if request.text is not None and request.text.format is not None:
        chat["response_format"] = _response_format(data["text"]["format"])
    try:
        return request, validated(chat, ChatRequest)
    except ApiError as error:
        raise renamed(error) from None


def parse_count(data: dict[str, Any]) -> ChatRequest:
    """The chat request whose prompt is to be counted, of instructions alone too; raises `ApiError` (400)."""
    _take_out(data, COUNT_NEUTRAL)
    if data.get("input") is None and isinstance(data.get("instructions"), str):
        data["input"] = [{"role": "system", "content": data.pop("instructions")}]
    return parse_responses(data)[1]


def _take_out(data: dict[str, Any], known: dict[str, tuple[Any, ...]]) -> None:
    """Drop fields that ask for nothing; raises `ApiError` (400) where one asks for something."""
    for name in data.keys() & known.keys():
        value = data.pop(name)
        neutral = known[name]
        if isinstance(value, dict):  # null is the same as leaving a field out
            value = {key: part for key, part in value.items() if part is not None}
        if not any(value == one and type(value) is type(one) for one in neutral):
            reason = _REASONS.get(name, "leave it out")
            message = f"`{name}` is not supported here: {reason}."
            raise ApiError(400, message, param=name, code="unsupported_parameter")


#: Fields of the same meaning.
_SAME = {
    "max_output_tokens": "max_completion_tokens",
    "parallel_tool_calls": "parallel_tool_calls",
    "chat_template_kwargs": "chat_template_kwargs",
}

#: This API's names for fields of the chat request that errors may name. What is inside them is another thing.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}


def renamed(error: ApiError) -> ApiError:
    """An error about the chat request, told in this API's names."""
    return in_names(error, _NAMES)


def _messages(request: ResponsesRequest, given: Any) -> list[dict[str, Any]]:
    """The input as messages of a chat; calls that follow one another are one assistant's message.

    So are a thought and what follows it of the assistant; one that nothing follows is a message of its own.
    """
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    items = [
        item | {"type": "message"} if isinstance(item, dict) and item.get("type") is None else item
        for item in given
    ]
    thought: dict[str, Any] | None = None  # the last message, as long as it is no more than that
    for item in checked(items):
        if isinstance(item, InputReasoning):
            if item.text and thought is not None:
                thought["reasoning_content"] += f"\n{item.text}"
            elif item.text:
                thought = {"role": "assistant", "content": "", "reasoning_content": item.text}
                messages.append(thought)
            continue
        if isinstance(item, InputCallOutput):
            messages.append({"role": "tool", "content": item.output, "tool_call_id": item.call_id})
        elif isinstance(item, InputCall):
            call = {
                "id": item.call_id,
                "type": "function",
                "function": {"name": full_name(item.namespace, item.name), "arguments": item.arguments},
            }
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif thought is not None and item.role == "assistant":
            thought["content"] = item.content
        else:
            messages.append({"role": item.role, "content": item.content})
        thought = None
    return messages


def _is_allowed_tools(choice: dict[str, Any]) -> bool:
    return (
        set(choice) == {"type", "mode", "tools"}
        and choice["mode"] in ("auto", "required")
        and isinstance(choice["tools"], list)
        and all(isinstance(tool, dict) and tool.get("type") == "function" for tool in choice["tools"])
    )


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and set(choice) == {"type", "name"}:
        return {"type": "function", "function": {"name": choice["name"]}}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools" and _is_allowed_tools(choice):
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice["mode"], "tools": list(map(_tool_choice, choice["tools"]))},
        }
    if choice not in ("none", "auto", "required"):
        raise bad_request(
            '`tool_choice` must be "none", "auto", "required", {"type": "function", "name": ...} or '
            '{"type": "allowed_tools", "mode": ..., "tools": [...]}.',
            "tool_choice",
            "invalid_type",
        )
    return choice


def _response_format(given: dict[str, Any]) -> dict[str, Any]:
    format_ = {name: value for name, value in given.items() if value is not None}
    if format_["type"] != "json_schema":
        if set(format_) != {"type"}:
            raise bad_request("`text.format` takes a schema with the type json_schema only.", "text.format")
        return dict(format_)
    if not isinstance(format_.get("schema"), dict):
        raise bad_request(
            "The field `text.format.schema` is required.", "text.format.schema", "missing_required_parameter"
        )
    inner = {"name": "response"} | {k: v for k, v in format_.items() if k != "type"}
    return {"type": "json_schema", "json_schema": inner}
