"""Messages of a conversation: what a request may hold, and what the model's chat template is given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from deployments.errors import ApiError, bad_request
from deployments.harmony_messages import in_channels
from deployments.request_model import DescribedModel
from deployments.schema_values import MessageText
from deployments.tool_parsers import FORMS
from deployments.tools import ToolCall, ToolUse


class ChatMessage(DescribedModel):
    """One message; what else a client sends with it (`parsed`, `annotations`, `refusal`) is not used.

    But for what holds a part of the conversation in a form that is not read here, and would be lost.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: MessageText = ""
    name: str | None = None
    reasoning_content: str | None = Field(None, description="For chat templates that read it.")
    reasoning: str | None = Field(None, description="The same, as vLLM calls it.")
    audio: None = None
    function_call: None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=128)
    tool_call_id: str | None = Field(None, min_length=1, max_length=256)

    @property
    def thought(self) -> str:
        """What an answer that is sent back began with."""
        return self.reasoning_content or self.reasoning or ""

    @property
    def num_chars(self) -> int:
        """Of what a template writes of it."""
        arguments = sum(len(call.function.arguments) for call in self.tool_calls or ())
        return len(self.content) + len(self.thought) + arguments


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Refuse messages whose fields do not fit their roles; raises `ApiError` (400) that names the field."""
    for number, message in enumerate(messages):
        path = f"messages.{number}"
        # An answer without text is sent back so by some clients.
        if "content" not in message.model_fields_set and message.role != "assistant":
            raise _missing(f"{path}.content")
        if message.tool_calls and message.role != "assistant":
            raise bad_request(f"`{path}.tool_calls` belongs to the role assistant.", f"{path}.tool_calls")
        if message.role == "tool" and message.tool_call_id is None:
            raise _missing(f"{path}.tool_call_id")
        if message.role != "tool" and message.tool_call_id is not None:
            raise bad_request(f"`{path}.tool_call_id` belongs to the role tool.", f"{path}.tool_call_id")


def for_template(
    messages: Sequence[ChatMessage],
    use: ToolUse,
    *,
    knows_tools: bool,
    parser: str,
    goes_on: bool = False,
    shows_calls: bool = True,
    shows_results: bool = True,
) -> list[dict[str, Any]]:
    """Messages as chat templates expect them; for one that knows no tools, these are told in words.

    So are calls and their results for one that leaves these out.

    Args:
        messages: of the request, checked.
        use: its tools.
        knows_tools: whether the template has a place for tools, calls and their results.
        parser: how the model writes calls: its template may not know of any, or reads them its own way.
        goes_on: whether the last message is to be gone on with.
        shows_calls, shows_results: whether a template that knows tools writes earlier calls, and results.

    Raises:
        ApiError: (400) if it cannot be.
    """
    if not knows_tools:
        shows_calls = shows_results = False
    made = [
        _plain(message, parser)
        if (shows_results if message.role == "tool" else shows_calls or not message.tool_calls)
        else _in_words(message, parser)
        for message in messages
    ]
    if knows_tools and parser == "harmony":
        return in_channels(made, goes_on=goes_on)
    if use.parses and not knows_tools:
        told = use.as_system_message()
        if made[0]["role"] == "system":
            made[0]["content"] += "\n\n" + told["content"]
        else:
            made.insert(0, told)
    return made


def _plain(message: ChatMessage, parser: str) -> dict[str, Any]:
    made: dict[str, Any] = {"role": _role(message), "content": message.content}
    if message.tool_calls:
        # Templates write the arguments as they see fit, so they want the object and not its text.
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    made |= _thought(message, parser)
    if message.role == "tool":
        made["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            made["name"] = message.name
    return made


def _in_words(message: ChatMessage, parser: str) -> dict[str, Any]:
    if message.role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.content}\n</tool_response>"}
    texts = [message.content] if message.content else []
    for call in message.tool_calls or ():
        name, arguments = call.function.name, _arguments(call.function.arguments)
        texts.append(FORMS.get(parser, FORMS["json"]).written(name, arguments))
    return {"role": _role(message), "content": "\n".join(texts), **_thought(message, parser)}


def _thought(message: ChatMessage, parser: str) -> dict[str, str]:
    """What was thought, under the names by which templates know it."""
    if not message.thought:
        return {}
    made = {"reasoning_content": message.thought}
    if parser != "harmony":  # whose messages are written anew
        made["reasoning"] = message.thought  # as vLLM gives it, too; Solar Open's reads nothing else
    if message.tool_calls and parser == "cohere":
        made["tool_plan"] = message.thought  # before calls
    return made


def _role(message: ChatMessage) -> str:
    return "system" if message.role == "developer" else message.role


def _arguments(text: str) -> dict[str, Any] | str:
    """The arguments of a call: an object, or the text itself where it is none, as the model wrote it.

    A call may have been malformed, or cut off. No text is no arguments, as vLLM reads it: so some servers
    stream calls of functions that take none.
    """
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _missing(path: str) -> ApiError:
    return bad_request(f"The field `{path}` is required.", path, "missing_required_parameter")
