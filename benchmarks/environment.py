"""Where a measurement was taken, for its JSON file."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = ("flotilla", "ray", "torch", "transformers")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        (line for line in info.read_text().splitlines() if line.startswith("model name"))
        if info.exists()
        else ()
    )
    return next((line.partition(":")[2].strip() for line in names), platform.processor())


def describe() -> dict[str, Any]:
    """Machine, load and versions; a high load average explains odd figures."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
    }
