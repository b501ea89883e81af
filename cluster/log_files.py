"""Where the lines of all processes are found: files of their own in the session of Ray."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.logs import Fields, configure_logs
from cluster.mirrored_log import MirrorHandler
from cluster.observability_config import LogConfig

#: Within the `logs` of Ray's session, where Ray's own files lie, which its tools and log collectors know.
_DIRECTORY = "flotilla"


def session_directory() -> Path | None:
    """That of the Ray this process belongs to; None outside of any, or where Ray no longer tells it."""
    # Ray tells it by no public name; its own tools ask here.
    worker: Any = importlib.import_module("ray._private.worker")
    node = getattr(worker, "_global_node", None)
    return None if node is None else Path(node.get_session_dir_path())


def log_directory() -> Path | None:
    """Where the processes of this machine have their files, unless `log.file` names one."""
    session = session_directory()
    return None if session is None else session / "logs" / _DIRECTORY


def shown_logs(config: LogConfig) -> str:
    """Where a person finds them."""
    if config.file is not None:
        return str(config.file)
    directory = log_directory()
    return "the standard error of each process" if directory is None else f"{directory}/*.log"


def log_to_files(config: LogConfig, process: Fields, context: Callable[[], Fields] = dict) -> logging.Handler:
    """As `configure_logs`, for a process of Ray's; `flotilla serve` also shows its warnings."""
    session = session_directory()
    also = [] if session is None else [MirrorHandler(session, process)]
    return configure_logs(config, process, context, log_directory(), also)
