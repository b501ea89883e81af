"""Variables that the chat template of a model may be given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator

#: What `apply_chat_template` takes for itself, and so cannot be a variable of a template.
_ARGUMENTS = frozenset(
    (
        "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
        "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors",
        "return_dict", "return_assistant_tokens_mask", "sanitize_control_tokens", "self", "tokenizer_kwargs",
    )
)  # fmt: skip


def no_variables(names: Iterable[str]) -> str:
    """Those of the names that no variable of a template may have, in words; empty if there are none."""
    return ", ".join(sorted(_ARGUMENTS.intersection(names)))


def _checked(given: Mapping[str, Any]) -> Mapping[str, Any]:
    if taken := no_variables(given):
        raise ValueError(f"may not set {taken}: requests or the server do")
    return given


TemplateVariables = Annotated[dict[str, Any], AfterValidator(_checked)]
