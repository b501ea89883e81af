"""How often a function is called: what grows shows in it, whatever else the machine does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def counting(function: Callable[P, T], calls: Counter[str]) -> Callable[P, T]:
    """The same, its calls counted."""

    @wraps(function)
    def counted(*args: P.args, **kwargs: P.kwargs) -> T:
        calls[function.__name__] += 1
        return function(*args, **kwargs)

    return counted
