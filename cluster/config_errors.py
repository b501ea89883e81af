"""What is wrong with a file that people write, in words for them."""

from __future__ import annotations

from pydantic import ValidationError


def wrong_fields(error: ValidationError, *, whole: str = "the file", skip: int = 0) -> list[str]:
    """One line for each wrong field; of values nothing is shown, one may be a secret at the wrong place.

    Args:
        error: what validation found.
        whole: what the lines call the file itself.
        skip: so many first parts of every place are left out.
    """
    lines = []
    for one in error.errors(include_url=False, include_input=False):
        place = ".".join(str(part) for part in one["loc"][skip:]) or whole
        lines.append(f"{place}: {_reason(one['type'], one['msg'])}")
    return lines


def _reason(kind: str, text: str) -> str:
    if kind == "extra_forbidden":
        return "there is no such field"
    if kind == "missing":
        return "is required"
    if kind in ("model_type", "dict_type"):
        return "must be fields with values, as in `{field: value}`"
    return text.removeprefix("Value error, ").replace("Input should be", "must be")
