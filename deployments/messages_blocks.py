"""Messages and tools of `/v1/messages`: blocks of several forms, told apart by their type."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import dropwhile
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from deployments.errors import bad_request
from deployments.request_model import DescribedModel
from deployments.tools import NAME

#: Anthropic's wrapping of arguments that are no JSON object, as a model may write them.
INVALID_JSON = "INVALID_JSON"
#: How a block begins that Claude Code puts into system prompts for Anthropic's bills. It differs between
#: requests, so that no two would have a prefix in common, and tells the model nothing.
_BILLING = "x-anthropic-billing-header:"


def _fail(message: str) -> PydanticCustomError:
    return PydanticCustomError("content_value", "{text}", {"text": message})


def _text(value: Any) -> Any:
    """A text, or blocks of text, each a line of its own."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content_type", "must be a string or a list of blocks")
    texts = []
    for number, block in enumerate(value):
        if (
            not isinstance(block, dict)
            or block.get("type") != "text"
            or not isinstance(block.get("text"), str)
        ):
            raise _fail(f'block {number} must be {{"type": "text", "text": ...}}; this model reads text only')
        texts.append(block["text"])
    return "\n".join(text for text in texts if not text.startswith(_BILLING))


_TEXT_BLOCK = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_TEXT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_BLOCK}, {"type": "null"}]}

#: Text, or blocks of it.
BlockText = Annotated[str, BeforeValidator(_text), WithJsonSchema(_TEXT)]


class TextBlock(DescribedModel):
    """Text."""

    type: Literal["text"]
    text: str


class ToolUseBlock(DescribedModel):
    """A call that an earlier answer held."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: str = Field(pattern=NAME)
    input: dict[str, Any] = Field(default_factory=dict)

    @property
    def arguments(self) -> str:
        """As text."""
        invalid = self.input.get(INVALID_JSON)
        if isinstance(invalid, str) and len(self.input) == 1:
            return invalid
        return json.dumps(self.input, ensure_ascii=False)


class ToolResultBlock(DescribedModel):
    """What a called tool returned."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=256)
    content: BlockText = ""
    is_error: bool | None = Field(None, description="Told to the model where there is no content.")


class ThinkingBlock(DescribedModel):
    """What a model thought before the answer that follows; what another server redacted is left out."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


_KINDS = {
    "text": "text",
    "tool_use": "tool_use",
    "tool_result": "tool_result",
    "thinking": "thinking",
    "redacted_thinking": "thinking",
}


def _kind(block: Any) -> str | None:
    kind = block.get("type") if isinstance(block, dict) else None
    return _KINDS.get(kind) if isinstance(kind, str) else None


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")],
    Discriminator(
        _kind,
        custom_error_type="content_value",
        custom_error_message="must be a block of the type text, tool_use, tool_result or thinking; "
        "this model reads text only",
    ),
]


def _blocks(value: Any) -> Any:
    """Text is the same as one block of it."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("content_type", "must be a string or a list of blocks")
    return value


_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"enum": sorted(_KINDS)}},
                "required": ["type"],
            },
        },
    ]
}


class Turn(DescribedModel):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], BeforeValidator(_blocks), WithJsonSchema(_CONTENT)] = Field(
        max_length=4096
    )


class FunctionTool(DescribedModel):
    """A tool that the client runs."""

    name: str = Field(pattern=NAME)
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="JSON schema of the input.")
    type: Literal["custom"] = "custom"


class OtherTool(DescribedModel):
    """A tool that this API's own servers run, or its own models know: the model does not hear of it."""

    type: str = Field(json_schema_extra={"not": {"const": "custom"}})


def _kind_of_tool(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return "other" if isinstance(kind, str) and kind != "custom" else "custom"


#: One that the client runs, or what is passed over.
MessagesTool = Annotated[
    Annotated[FunctionTool, Tag("custom")] | Annotated[OtherTool, Tag("other")], Discriminator(_kind_of_tool)
]


#: Whose turns blocks belong to, where that is not as may be.
_ROLES = {
    "tool_use": "assistant",
    "tool_result": "user",
    "thinking": "assistant",
    "redacted_thinking": "assistant",
}


def as_chat(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The conversation as messages of a chat; raises `ApiError` (400) for a block in another one's turn.

    Turns that follow one another in the same role are one, as this API has it; what tools returned, which a
    user's turn holds, are messages of their own.
    """
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        for place, block in enumerate(turn.content):
            if turn.role != _ROLES.get(block.type, turn.role):
                raise bad_request(
                    f"`messages.{number}.content.{place}`: a block of the type {block.type} belongs to the "
                    f"role {_ROLES[block.type]}.",
                    f"messages.{number}.content.{place}",
                )
            match block:
                case TextBlock(text=text):
                    if not text.startswith(_BILLING):
                        _last_of(messages, turn.role)["content"].append(text)
                case ToolUseBlock():
                    call = {
                        "id": block.id,
                        "type": "function",
                        "function": {"name": block.name, "arguments": block.arguments},
                    }
                    _last_of(messages, "assistant").setdefault("tool_calls", []).append(call)
                case ToolResultBlock():
                    texts = [block.content or ("error" if block.is_error else "")]
                    messages.append({"role": "tool", "content": texts, "tool_call_id": block.tool_use_id})
                case ThinkingBlock(thinking=thought) if thought:
                    _last_of(messages, "assistant").setdefault("reasoning_content", []).append(thought)
        if not turn.content:
            _last_of(messages, turn.role)["content"].append("")
    for message in messages:
        # Joined once: a text that grew by each of a hundred thousand blocks took seconds.
        message["content"] = "\n".join(dropwhile(lambda text: not text, message["content"]))
        if "reasoning_content" in message:
            message["reasoning_content"] = "\n".join(message["reasoning_content"])
    return messages


def _last_of(messages: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """The last message, if it is that role's, else a new one; its texts are still apart."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": []})
    return messages[-1]
