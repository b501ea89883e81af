"""What is wrong with a file that people write, in words for them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from cluster.validation_words import in_words

#: How pydantic names, in the place of an error, the alternative that a value could have been.
_ALTERNATIVE = re.compile(r"(constrained-\w+|literal\[.*|function-.*|list\[.*|tuple\[.*|int|float|str|bool)")

#: The last part of a place where not the value of an entry is wrong but its name, the part before.
_NAME = "[key]"


def wrong_fields(
    error: ValidationError,
    *,
    whole: str = "the file",
    skip: int = 0,
    model: type[BaseModel] | None = None,
) -> list[str]:
    """One line for each wrong field; of values nothing is shown, one may be a secret at the wrong place.

    Args:
        error: what validation found.
        whole: what the lines call the file itself.
        skip: so many first parts of every place are left out.
        model: of the file; fields that are not there are compared with its.
    """
    reasons: dict[str, list[str]] = {}
    for one in error.errors(include_url=False, include_input=False):
        place = ".".join(str(part) for part in _field(one["loc"])[skip:]) or whole
        if one["type"] == "extra_forbidden":
            name = field_meant(model, one["loc"])
            reason = "there is no such field" + (f"; did you mean `{name}`?" if name else "")
        elif one["type"] == "missing":
            reason = "is required"
        else:
            reason = in_words(one["type"], one["msg"], one.get("ctx"))
        if one["loc"][-1:] == (_NAME,):
            reason = f"the name {reason}"
        reasons.setdefault(place, []).append(reason)
    return [f"{place}: {_alternatives(several)}" for place, several in reasons.items()]


def _field(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The place of a field that has several kinds of values, of which each is wrong in its way.

    Or that of an entry whose name is wrong.
    """
    if location[-1:] == (_NAME,):
        return location[:-1]
    while location[1:] and isinstance(location[-1], str) and _ALTERNATIVE.fullmatch(location[-1]):
        location = location[:-1]
    return location


def _alternatives(reasons: list[str]) -> str:
    first, *others = dict.fromkeys(reasons)
    return ", or ".join([first, *(other.removeprefix("must be ") for other in others)])


def field_meant(model: type[BaseModel] | None, location: tuple[int | str, ...]) -> str:
    """Which field was meant by an unknown one: that of its section which is called alike, if there is one."""
    sections = [] if model is None else [model]
    for part in location[:-1]:
        sections = [found for section in sections for found in _within(section, part)]
    names = [name for section in sections for name in section.model_fields]
    return next(iter(get_close_matches(str(location[-1]), names, n=1)), "")


def _within(section: type[BaseModel], part: int | str) -> Iterator[type[BaseModel]]:
    """The sections to which a part of a place leads: by a field's name, a position, or a kind."""
    if isinstance(part, int) or part not in section.model_fields:
        yield section  # an item or entry of what the field holds, or one of the kinds it may be
        return
    yield from _models(section.model_fields[part].annotation)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)
