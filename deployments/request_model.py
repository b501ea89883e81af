"""What all JSON objects of requests have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


def _take_null(schema: dict[str, Any]) -> None:
    schema["additionalProperties"] = {"type": "null"}


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
