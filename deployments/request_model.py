"""What all JSON objects of requests have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


def _take_null(schema: dict[str, Any]) -> None:
    schema["additionalProperties"] = {"type": "null"}


def _take_any(schema: dict[str, Any]) -> None:
    schema["additionalProperties"] = True


class RequestModel(BaseModel):
    """Types are strict, unknown fields refused, and null is the same as leaving a field out, known or not.

    Clients write out what their types have and nobody set: a client newer than this server, or an answer that
    is sent back, has nulls under names that are not known here, and they ask for nothing.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, json_schema_extra=_take_null
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


class DescribedModel(RequestModel):
    """What describes a conversation or a tool, and asks for nothing: fields that are unknown are left out.

    Clients send messages back as they got them, from whichever server and through gateways that add fields of
    their own (`reasoning_content`, `provider_specific_fields`, `cache_control`).
    """

    model_config = ConfigDict(extra="ignore", json_schema_extra=_take_any)
