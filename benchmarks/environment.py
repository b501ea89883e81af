"""Where a measurement was taken, for its JSON file."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
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


def _gpu() -> str | None:
    """The first GPU that this process sees, if it has imported torch: nothing is imported for a name."""
    torch = sys.modules.get("torch")
    return str(torch.cuda.get_device_name()) if torch is not None and torch.cuda.is_available() else None


def describe() -> dict[str, Any]:
    """Machine, load and versions; a high load average explains odd figures."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "gpu": _gpu(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
    }
