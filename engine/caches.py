"""Where what can be computed again is kept on a machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path | None:
    """Where what can be computed again is kept: `FLOTILLA_CACHE`, or `flotilla` where the user's caches are.

    None for a user without a home.
    """
    own, caches = os.environ.get("FLOTILLA_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    try:
        return (Path(caches) if caches else Path.home() / ".cache") / "flotilla"
    except RuntimeError:
        return None
