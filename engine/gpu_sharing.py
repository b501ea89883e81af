"""Whether processes on one GPU compute at the same time, or take turns."""

from __future__ import annotations

import os
from pathlib import Path

#: Where NVIDIA's Multi-Process Service listens if nothing else is said.
DEFAULT_PIPES = "/tmp/nvidia-mps"


def why_by_turns() -> str | None:
    """Why processes that share a GPU of this machine take turns on it; None if they compute together.

    Without the Multi-Process Service each process has the whole GPU for a slice of time, milliseconds, so
    that a draft waits for the end of the target's slice, and nothing of the two overlaps.
    """
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or DEFAULT_PIPES)
    if (pipes / "control").exists():
        return None
    return (
        f"processes on this GPU take turns, for NVIDIA's Multi-Process Service does not listen in {pipes}: "
        "start `nvidia-cuda-mps-control -d` before Ray on this node, or set CUDA_MPS_PIPE_DIRECTORY "
        "(docs/gpu.md)"
    )
