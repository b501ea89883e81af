"""How many examples a property is tried with: few in every run of the tests, all in a thorough one."""

from __future__ import annotations

import gzip
import json
import os
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


def tell_of_utf_8() -> None:
    """Have Hypothesis find what it would find out by encoding each character there is: three seconds or more.

    It keeps that for the next time, of which there is none for a fresh clone. In a file of another name or
    form it finds nothing, and does so itself.
    """
    try:
        from hypothesis.internal.charmap import charmap_file
    except ImportError:  # a name that is not ours
        return
    file = charmap_file("codec-v2-utf-8")
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        all_but_surrogates, not_decoded_as_they_were = [[0, 0xD7FF], [0xE000, 0x10FFFF]], []
        whole = file.with_suffix(f".{os.getpid()}")  # the other process of the tests does the same
        with gzip.open(whole, "wt") as kept:
            json.dump([all_but_surrogates, not_decoded_as_they_were], kept)
        whole.replace(file)
