"""What processes write to their logs: lines for people, or one JSON object per line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from typing import Any

import msgspec

from cluster.observability_config import LogConfig

#: Whose lines are ours to format; other packages' are left to them.
PACKAGES = ("cluster", "deployments", "drafters", "engine", "selector", "verifier")

Fields = Mapping[str, Any]


def configure_logs(
    config: LogConfig, process: Fields, context: Callable[[], Fields] = dict
) -> logging.Handler:
    """Have this process log as configured; may be called again.

    Args:
        config: format, level, where to.
        process: fields of every line, such as `cell`.
        context: further fields of the line at hand, such as `request_id`.

    Returns:
        what writes the lines.
    """
    handler: logging.Handler
    if config.file is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        config.file.parent.mkdir(parents=True, exist_ok=True)
        handler = WatchedFileHandler(config.file, encoding="utf-8")
    make = JsonFormatter if config.format == "json" else TextFormatter
    handler.setFormatter(make(process, context))
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers = [handler]
        logger.setLevel(config.level.upper())
        logger.propagate = False
    return handler


class _FieldsFormatter(logging.Formatter):
    """Collects a line's fields: the process's, the context's, and those passed as `extra={"fields": ...}`."""

    def __init__(self, process: Fields, context: Callable[[], Fields]) -> None:
        super().__init__()
        self._process = dict(process)
        self._context = context

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """In order; later ones win."""
        own: Fields = getattr(record, "fields", {})
        return {**self._process, **self._context(), **own}


class JsonFormatter(_FieldsFormatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self.fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class TextFormatter(_FieldsFormatter):
    """Time, level, message, and the fields as `name=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = " ".join(f"{name}={_plain(value)}" for name, value in self.fields(record).items())
        line = f"{time} {record.levelname.lower()} {record.name}: {record.getMessage()} {fields}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
