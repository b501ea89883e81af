"""Whether Triton can serve here."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import torch


def why_not_triton(device: torch.device) -> str | None:
    """What keeps Triton from serving there; None if nothing."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (CUDA builds of torch bring it; pip install triton)"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda":
        return (
            f"Triton needs a CUDA device, not {device} (or TRITON_INTERPRET=1, to try its kernels on a CPU)"
        )
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler for what launches its kernels: install gcc, or set CC"
    scheme = sysconfig.get_default_scheme()
    # The default of Debian's own Python is where pip puts headers, not where its own are; Triton knows, too.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    header = Path(sysconfig.get_path("include", scheme)) / "Python.h"
    if not header.is_file():
        return f"Triton needs Python's C headers: {header} is missing (python3-dev has it)"
    return None


@functools.cache
def runs_triton(device: torch.device) -> bool:
    """Whether it is a GPU on which Triton serves; asked once per process, since it looks through folders."""
    return device.type == "cuda" and why_not_triton(device) is None
