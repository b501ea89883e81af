"""What an error says, in the one line that people are shown of it."""

from __future__ import annotations

#: Whose messages are written to be shown whole. Classes of Python's, such as `ValueError`, tell nothing of who
#: raised them: of theirs the first line is taken, which is all of ours.
_OWN = frozenset({"cluster", "deployments", "drafters", "engine", "selector", "verifier", "zoo"})
_TRACEBACK = "Traceback (most recent call last)"


def text_of(error: BaseException) -> str:
    """The message of an error of ours, whole; of another's, the first line of what it was raised for.

    The last line where there is nothing but a traceback.
    """
    while not _is_own(error) and isinstance(error.__cause__, BaseException) and _says(error.__cause__):
        error = error.__cause__
    text = _message(error)
    if _is_own(error) and text:
        return text
    if not text:
        return repr(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if _TRACEBACK in text:
        return lines[-1]
    # A missing key or a name alone: what is wrong with it, its class must say.
    return lines[0] if _says(error) else f"{type(error).__name__}: {text}"


def _is_own(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in _OWN


def _says(error: BaseException) -> bool:
    return " " in _message(error) or _is_own(error)


def _message(error: BaseException) -> str:
    # `str` quotes the message of a `KeyError`, and of an `OSError` it is more than its first argument.
    if isinstance(error, KeyError) and error.args:
        return str(error.args[0]).strip()
    return str(error).strip()
