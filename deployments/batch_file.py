"""Files of `flotilla batch`, in OpenAI's Batch format: the requests of one, and the answers in the other."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")

#: Beginning of every line that is written, by which a cut one is known.
_BEGINNING = b'{"id": "batch_req_'


class BatchFileError(Exception):
    """A file is not what it is taken for, or cannot be read or written; the message says which and why."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request of a batch.

    Attributes:
        custom_id: names it within its file.
        endpoint: the path it is for.
        line: all of it, as JSON: a file has many, and as objects they take several times the memory.
        has_model: whether it says for which model it is.
    """

    custom_id: str
    endpoint: str
    line: bytes
    has_model: bool

    @property
    def body(self) -> dict[str, Any]:
        """What is to be sent, as the file has it."""
        body: dict[str, Any] = json.loads(self.line)["body"]
        return body


def read_requests(path: Path) -> list[BatchRequest]:
    """All requests of a file, in its order.

    Raises:
        BatchFileError: if any of them is wrong, or the file cannot be read.
    """
    requests: list[BatchRequest] = []
    lines_of: dict[str, int] = {}
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                request = _parse_request(line, where)
                first = lines_of.setdefault(request.custom_id, number)
                if first != number:
                    raise BatchFileError(
                        f"{where}: `custom_id` {request.custom_id!r} is that of line {first}, too; answers "
                        "are told apart by it, so give each request its own"
                    )
                requests.append(request)
    except OSError as error:
        raise BatchFileError(f"cannot read {path}: {error.strerror}") from None
    if not requests:
        raise BatchFileError(f"{path} has no requests in it")
    return requests


def _parse_request(line: bytes, where: str) -> BatchRequest:
    fields = _parse_object(line, where)
    custom_id, body = fields.get("custom_id"), fields.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise BatchFileError(f"{where}: `custom_id` must be a string, by which the answer is found again")
    if fields.get("method") != "POST":
        raise BatchFileError(f'{where}: `method` must be "POST"')
    if fields.get("url") not in ENDPOINTS:
        raise BatchFileError(f"{where}: `url` must be one of {', '.join(ENDPOINTS)}")
    if not isinstance(body, dict):
        raise BatchFileError(f"{where}: `body` must be an object, the request as it would be sent by itself")
    if body.get("stream") is True:
        raise BatchFileError(f"{where}: answers are written whole; leave out `stream`")
    return BatchRequest(custom_id, fields["url"], line, body.get("model") is not None)


def _parse_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(line, parse_constant=_refuse_constant)
    except ValueError as error:  # also of bytes that are no UTF-8
        raise BatchFileError(f"{where}: is no JSON ({error}); each line must be one whole object") from None
    except RecursionError:
        raise BatchFileError(f"{where}: is nested too deeply") from None
    if not isinstance(fields, dict):
        raise BatchFileError(f"{where}: must be an object")
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def answer_line(custom_id: str, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """What is written of a request that the server answered, be it with an error."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _line(custom_id, response, None)


def error_line(custom_id: str, code: str, message: str) -> dict[str, Any]:
    """What is written of a request to which there is no answer that could be written."""
    return _line(custom_id, None, {"code": code, "message": message})


def _line(
    custom_id: str, response: Mapping[str, Any] | None, error: Mapping[str, str] | None
) -> dict[str, Any]:
    line_id = f"batch_req_{secrets.token_hex(12)}"
    return {"id": line_id, "custom_id": custom_id, "response": response, "error": error}


class BatchOutput:
    """A file of answers, old ones and those that are appended; a context manager.

    A last line that a killed process did not finish is removed. Nobody else may write meanwhile.

    Attributes:
        answered: `custom_id` of requests whose last line is a 200.

    Raises:
        BatchFileError: if it holds anything but answers, is being written by somebody else, or cannot be.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._statuses: dict[str, int | None] = {}
        try:
            if path.exists() and not path.is_file():
                raise BatchFileError(f"{path} is no file that could be read again")
            self._file = path.open("ab+", buffering=0)
            try:
                self._lock()
                self._read()
            except BaseException:
                self._file.close()
                raise
        except OSError as error:
            raise BatchFileError(f"cannot write {path}: {error.strerror}") from None
        self.answered = frozenset(name for name, status in self._statuses.items() if status == 200)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, line: Mapping[str, Any]) -> None:
        """Write a line, which is in the file (though not necessarily on the disk) when this returns.

        Raises:
            BatchFileError: if it cannot be written; what was written of it, the next start removes.
        """
        left = memoryview(_encode(line))
        try:
            while left:
                left = left[os.write(self._file.fileno(), left) :]
        except OSError as error:
            raise BatchFileError(f"cannot write {self._path}: {error.strerror}") from None

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchFileError(f"another `flotilla batch` is writing {self._path}") from None
        except OSError:  # a file system without locks
            pass

    def _read(self) -> None:
        self._file.seek(0)
        end = 0
        with open(self._file.fileno(), "rb", closefd=False) as lines:
            for number, line in enumerate(lines, 1):
                is_last = not line.endswith(b"\n")
                if is_last and not _is_whole(line):
                    if line[: len(_BEGINNING)] != _BEGINNING[: len(line)]:
                        raise BatchFileError(self._foreign())
                    self._file.truncate(end)
                    return
                self._add(line, number)
                end += len(line)
                if is_last:
                    os.write(self._file.fileno(), b"\n")
                    return

    def _add(self, line: bytes, number: int) -> None:
        if not line.strip():
            return
        fields = _parse_object(line, f"{self._path}, line {number}")
        custom_id, response = fields.get("custom_id"), fields.get("response", False)
        if not isinstance(custom_id, str) or not (response is None or isinstance(response, dict)):
            raise BatchFileError(self._foreign())
        self._statuses[custom_id] = None if response is None else response.get("status_code")

    def _foreign(self) -> str:
        return f"{self._path} holds something else than answers; name another file for them"


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _encode(line: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(line, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # halves of surrogate pairs, which only JSON's escapes can name
        return json.dumps(line).encode() + b"\n"
