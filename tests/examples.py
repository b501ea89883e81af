"""How many examples a property is tried with: few in every run of the tests, all in a thorough one."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

# But for CI, where they are the same each time, Hypothesis draws others: runs add up to a thorough one.
QUICK_SHARE = 0.15
LEAST = 5
_share = QUICK_SHARE


def examples(most: int = 100, **others: Any) -> settings:
    """Settings of a property.

    Args:
        most: examples of a thorough run.
        others: fields of `hypothesis.settings`; without one, examples may take any time, as they share cores.
    """
    few = min(most, max(LEAST, round(_share * most)))
    return settings(max_examples=few, **{"deadline": None, **others})


def begin(*, thorough: bool) -> None:
    """Before tests are imported: what `examples` gives, and properties without settings of their own have."""
    global _share
    _share = 1.0 if thorough else QUICK_SHARE
    settings.register_profile("flotilla", examples())
    settings.load_profile("flotilla")
