"""A real browser for tests: the Chromium that the machine has."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium to drive: install Debian's package `chromium`"
)

#: How Playwright starts it. A sandbox cannot be had as root; the other flags keep it from calling its makers.
LAUNCH: dict[str, Any] = {
    "executable_path": CHROMIUM,
    "args": [
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ],
}
