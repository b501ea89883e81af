"""Where a measurement was taken, for its JSON file."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.code_version import version_of
from cluster.config import FlotillaConfig

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


def of_cell(config: FlotillaConfig, module: str) -> dict[str, Any]:
    """What else it takes to repeat a measurement of a cell: its whole configuration, and which code ran.

    The path of a file tells neither, once the file has changed or is gone.
    """
    return {"cell": config.model_dump(mode="json"), "code version": version_of(module)}


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
