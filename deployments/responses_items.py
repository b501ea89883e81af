"""Items of `/v1/responses`: what its input and its tools are, of several forms told apart by their type."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from deployments.errors import ApiError, bad_request, without_form
from deployments.openai_schema import validated
from deployments.request_model import DescribedModel, RequestModel
from deployments.schema_values import MessageText
from deployments.tool_calls import LONGEST_NAME
from deployments.tools import NAME


class InputMessage(DescribedModel):
    """A message of the conversation, also one that an earlier response held."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: MessageText
    id: str | None = None
    status: str | None = None


class InputCall(DescribedModel):
    """A call that an earlier response held."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=256)
    name: str = Field(pattern=NAME)
    namespace: str | None = Field(None, pattern=NAME)
    arguments: str = Field(max_length=1 << 20)
    id: str | None = None
    status: str | None = None


class InputCallOutput(DescribedModel):
    """What a called function returned."""

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=256)
    output: MessageText
    id: str | None = None
    status: str | None = None


class ReasoningText(DescribedModel):
    """A part of what a model thought; that of other kinds is left out."""

    type: str
    text: str = ""


class InputReasoning(DescribedModel):
    """What the model thought before the answer that follows; of others' what is encrypted is left out."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = Field(None, max_length=1024)

    @property
    def text(self) -> str:
        """All of it."""
        return "\n".join(part.text for part in self.content or () if part.type == "reasoning_text")


class ResponseFunction(DescribedModel):
    """A function that the model may ask to have called, in this API's flat form."""

    type: Literal["function"]
    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class OtherTool(DescribedModel):
    """A tool that is no function: the model does not hear of it, and the response does not list it.

    Agents send those they know (web search, patches) to any server they use.
    """

    type: str = Field(json_schema_extra={"not": {"enum": ["function", "namespace"]}})


def _kind_of_tool(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return "other" if isinstance(kind, str) and kind != "function" else "function"


def _kind_of_entry(tool: Any) -> str:
    is_namespace = isinstance(tool, dict) and tool.get("type") == "namespace"
    return "namespace" if is_namespace else _kind_of_tool(tool)


class ResponseNamespace(DescribedModel):
    """Functions that stand together, as Codex groups those of a server of the Model Context Protocol."""

    type: Literal["namespace"]
    name: str = Field(pattern=NAME)
    description: str | None = None
    tools: list[
        Annotated[
            Annotated[ResponseFunction, Tag("function")] | Annotated[OtherTool, Tag("other")],
            Discriminator(_kind_of_tool),
        ]
    ]

    @property
    def functions(self) -> list[ResponseFunction]:
        """Those of its tools that the model hears of."""
        return [tool for tool in self.tools if isinstance(tool, ResponseFunction)]


#: A function, several of them, or what is passed over.
ResponseTool = Annotated[
    Annotated[ResponseFunction, Tag("function")]
    | Annotated[ResponseNamespace, Tag("namespace")]
    | Annotated[OtherTool, Tag("other")],
    Discriminator(_kind_of_entry),
]


def full_name(namespace: str | None, name: str) -> str:
    """What a model calls a function, as in vLLM: it knows of no namespaces.

    Raises:
        ApiError: (400) that is longer than the name of a function may be.
    """
    if namespace is None:
        return name
    if len(full := f"{namespace}__{name}") > LONGEST_NAME:
        raise bad_request(
            f"The model would call the function '{name}' of the namespace '{namespace}' by both names and "
            f"two underscores; that may be at most {LONGEST_NAME} characters long and is {len(full)}.",
            "tools",
        )
    return full


@dataclass(frozen=True)
class CallableFunction:
    """A function that the model may call, and the namespace it is in."""

    function: ResponseFunction
    namespace: str | None = None

    @property
    def full_name(self) -> str:
        """See `full_name`."""
        return full_name(self.namespace, self.function.name)

    def told(self) -> dict[str, Any]:
        """As the function of a chat's tool."""
        shown = self.function.model_dump(exclude={"type"}, exclude_none=True)
        return shown | {"name": self.full_name}


class _Input(RequestModel):
    """The items, validated apart so that an error names the item and not all forms it might have had."""

    input: list[
        Annotated[
            Annotated[InputMessage, Tag("message")]
            | Annotated[InputCall, Tag("function_call")]
            | Annotated[InputCallOutput, Tag("function_call_output")]
            | Annotated[InputReasoning, Tag("reasoning")],
            Field(discriminator="type"),
        ]
    ] = Field(min_length=1, max_length=4096)


#: Pydantic's paths go through the name of the form that a thing has, which the JSON has not.
FORM = re.compile(
    r"((?:^input|^tools|\.tools)\.\d+)"
    r"\.(?:message|function_call|function_call_output|reasoning|function|namespace|other)(?=\.|$)"
)


def checked(items: list[Any]) -> Sequence[InputMessage | InputCall | InputCallOutput | InputReasoning]:
    """The items of an input; raises `ApiError` (400) that names the one at fault."""
    for place, item in enumerate(items):
        if _is_reference(item):
            # As the AI SDK sends by itself for every answer it had, also to whom said that it stores nothing.
            raise bad_request(
                f"`input.{place}` refers to an item of an earlier response, but this server stores none. "
                "Send the item itself, as clients do that are told `store: false`.",
                f"input.{place}",
                "unsupported_parameter",
            )
    try:
        return validated({"input": items}, _Input).input
    except ApiError as error:
        raise without_form(error, FORM) from None


def _is_reference(item: Any) -> bool:
    """Whether an item names one that OpenAI would have stored; its type may be left out."""
    if not isinstance(item, dict):
        return False
    return item.get("type") == "item_reference" or (
        item.keys() == {"type", "id"} and item["type"] == "message"
    )
