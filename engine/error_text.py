"""What an error says, in the one line that people are shown of it."""

from __future__ import annotations

#: Whose messages are written to be shown whole. Classes of Python's, such as `ValueError`, do not tell who
#: raised them: of theirs the first line is taken, which is all there is of ours.
_OWN = frozenset({"cluster", "deployments", "drafters", "engine", "selector", "verifier", "zoo"})
_TRACEBACK = "Traceback (most recent call last)"


def text_of(error: BaseException) -> str:
    """The message of an error of ours, whole; of another's, the first line of what it was raised for.

    The last line where there is nothing but a traceback.
    """
    while not is_own(error) and error.__cause__ is not None and _says(error.__cause__):
        if _announces(error):  # it says itself what it was raised for, and of which field
            break
        error = error.__cause__
    text = _message(error)
    if not text:
        return repr(error)
    if is_own(error):
        return text
    if _TRACEBACK in text:
        return text.splitlines()[-1].strip()
    # A missing key or a name alone: what is wrong with it, its class must say.
    return _first_line(error) if _says(error) else f"{type(error).__name__}: {text}"


def is_own(error: BaseException) -> bool:
    """Whether its class is one of Flotilla's."""
    return type(error).__module__.partition(".")[0] in _OWN


def _says(error: BaseException) -> bool:
    return " " in _message(error) or is_own(error)


def _first_line(error: BaseException) -> str:
    """With the line after it, if it announces that."""
    lines = _lines(error)
    return " ".join(lines[:2]) if _announces(error) else lines[0]


def _announces(error: BaseException) -> bool:
    lines = _lines(error)
    return len(lines) > 1 and lines[0].endswith(":")


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in _message(error).splitlines() if line.strip()]


def _message(error: BaseException) -> str:
    # `str` quotes the message of a `KeyError`, and of an `OSError` it is more than its first argument.
    if isinstance(error, KeyError) and error.args:
        return str(error.args[0]).strip()
    return str(error).strip()
