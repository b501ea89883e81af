"""What processes write to their logs: lines for people, or one JSON object per line."""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler, WatchedFileHandler
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from cluster.observability_config import LogConfig

#: Whose lines are ours to format; other packages' are left to them.
PACKAGES = ("cluster", "deployments", "drafters", "engine", "selector", "verifier")

Fields = Mapping[str, Any]
_ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

#: Of a process's own file, which is begun anew at this size; so many earlier ones are kept.
_FILE_BYTES = 100 << 20
_EARLIER_FILES = 5


def configure_logs(
    config: LogConfig,
    process: Fields,
    context: Callable[[], Fields] = dict,
    directory: Path | None = None,
    also: Sequence[logging.Handler] = (),
) -> logging.Handler:
    """Have this process log as configured; may be called again.

    Args:
        config: format, level, where to.
        process: fields of every line, such as `cell`.
        context: further fields of the line at hand, such as `request_id`.
        directory: where the process gets a file of its own unless `config` names one; standard error if None.
        also: who else is given every line.

    Returns:
        what writes the lines.
    """
    handler = _handler(config.file, directory, process)
    make = JsonFormatter if config.format == "json" else TextFormatter
    handler.setFormatter(make(process, context))
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers = [handler, *also]
        logger.setLevel(config.level.upper())
        logger.propagate = False
    return handler


def _handler(file: Path | None, directory: Path | None, process: Fields) -> logging.Handler:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        return WatchedFileHandler(file, encoding="utf-8")
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        name = "-".join(f"{field}-{value}" for field, value in process.items())
        name = re.sub(r"[ /]", "-", name)  # ranks are called `verifier rank 0`, instances `NAME/0`
        own = directory / f"{name}.log"
        return RotatingFileHandler(own, maxBytes=_FILE_BYTES, backupCount=_EARLIER_FILES, encoding="utf-8")
    # In a replica of Ray Serve `sys.stderr` writes a prefix before every line: JSON would be none.
    return logging.StreamHandler(sys.__stderr__ or sys.stderr)


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

    def formatException(self, ei: _ExceptionInfo) -> str:
        """See `logging.Formatter`, which prints into a string: Ray Serve's `print` writes tuples there."""
        return "".join(traceback.format_exception(*ei)).rstrip("\n")


class JsonFormatter(_FieldsFormatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _encodable(record.getMessage()),
            **self.fields(record),
        }
        if record.exc_info:
            line["exception"] = _encodable(self.formatException(record.exc_info))
        return msgspec.json.encode(line, enc_hook=str).decode()


class TextFormatter(_FieldsFormatter):
    """Time, level, message, and the fields as `name=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = " ".join(f"{name}={_plain(value)}" for name, value in self.fields(record).items())
        line = f"{time} {record.levelname.lower()} {record.name}: {record.getMessage()} {fields}".rstrip()
        line = f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line
        return _encodable(line)


def _encodable(text: str) -> str:
    """The text; half a character, as escapes in JSON may bring, would cost the whole line."""
    return text.encode("utf-8", "backslashreplace").decode()


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
