"""Tests of what is done one by one for few and at once for many: every test of a module in both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest


def both_ways(module: ModuleType, most: str, few: int) -> Callable[..., Any]:
    """A fixture for a whole test module, with `module.most`, how many count as few, at `few` and at 0."""

    @pytest.fixture(autouse=True, scope="module", params=[few, 0], ids=["one by one", "at once"])
    def fixture(request: pytest.FixtureRequest) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, most, request.param)
            yield

    return fixture
