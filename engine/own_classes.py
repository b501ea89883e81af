"""Classes of users, named in a configuration by their dotted import path, and what is said of failures."""

from __future__ import annotations

import logging
import pkgutil
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from traceback import extract_tb
from types import TracebackType
from typing import Any

_log = logging.getLogger(__name__)


class OwnClassError(ValueError):
    """A user's policy or selector failed, or answered what none may answer; the message names it."""


def is_own(name: str) -> bool:
    """Whether a policy or selector is named by an import path, as in `my_policies.Cautious`."""
    return "." in name


def make_own(name: str, what: str, argument: object, methods: Sequence[str]) -> Any:
    """What the class, or whatever else can be called, that a dotted name stands for makes of `argument`.

    Args:
        name: of a module that can be imported, and of what is in it.
        what: it is meant to be, for the error.
        argument: it is called with.
        methods: that it must have then.

    Raises:
        OwnClassError: if it cannot be imported or called, fails, or lacks a method.
    """
    found = find_own(name, what)
    with Guard(name, what, found).during("its constructor"):
        made = found(argument)
    for method in methods:
        if not callable(getattr(made, method, None)):
            raise OwnClassError(f"the {what} `{name}` has no method `{method}`")
    return made


def find_own(name: str, what: str) -> Callable[[object], Any]:
    """The class, or whatever else can be called, that a dotted name stands for; as of `make_own`."""
    try:
        found: object = pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise OwnClassError(
            f"the {what} `{name}` cannot be imported: {error}. Its module must be installed, or lie in a "
            "directory on PYTHONPATH, where the cell runs"
        ) from error
    # What a module does at its import is somebody else's code, and a script among them ends the process.
    except (Exception, SystemExit) as error:
        raise OwnClassError(
            f"the {what} `{name}` cannot be imported, as its module fails: {type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise OwnClassError(f"the {what} `{name}` is no class: it cannot be called")
    return found


class Guard:
    """Has errors of a user's class say which class, in what and where; nothing it does may end a cell.

    Args:
        name: of the class, as configured.
        what: it is: a policy or a selector.
        own: the class, or what it made: its file is where an error is looked for.
        instead: what is done where it fails, for the log; if None, its errors are raised.

    Attributes:
        instead: as above.
    """

    def __init__(self, name: str, what: str, own: object, instead: str | None = None) -> None:
        self._who, self._own, self.instead = f"the {what} `{name}`", own, instead
        self._num_failed = 0

    def during(self, part: str) -> AbstractContextManager[None, bool]:
        """Guards what is done within: a call of `part` of the class, and a look at what it answers.

        Raises:
            OwnClassError: when that ends, for whatever was raised; not if errors are to be logged.
        """
        return _During(self, part)

    def failed(self, part: str, error: Exception) -> None:
        """Raise, or log, what went wrong in a part."""
        if isinstance(error, OwnClassError):
            told = f"{self._who}: {error}"
        else:
            told = f"{self._who} failed in {part}{self._place(error)}: {type(error).__name__}: {error}"
        if self.instead is None:
            raise OwnClassError(told) from error
        self._num_failed += 1
        if self._num_failed & (self._num_failed - 1) == 0:  # the first, and ever more seldom
            _log.error("%s; %s (errors so far: %d)", told, self.instead, self._num_failed)

    def _place(self, error: Exception) -> str:
        """The last line of the user's file that led to it; empty if none did, as with a missing argument."""
        module = sys.modules.get(getattr(self._own, "__module__", ""))
        path = getattr(module, "__file__", None)
        lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == path]
        return f" at {path}:{lines[-1]}" if lines else ""


class _During:
    def __init__(self, guard: Guard, part: str) -> None:
        self._guard, self._part = guard, part

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):  # it is somebody else's code: any may come out of it
            return False
        self._guard.failed(self._part, error)
        return True
