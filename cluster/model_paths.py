"""Where a model named in the configuration lies."""

from __future__ import annotations

import platform
import re
from pathlib import Path

_ZOO = "zoo:"
#: How the Hub names models; a relative path of two parts looks alike.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def model_directory(path: str) -> Path:
    """The directory of a configured model; `zoo:NAME` is one of the embedded demo family.

    Raises `FileNotFoundError` or `KeyError`, saying which directory or which names there are.
    """
    return _directory(path, "model", "config.json")


def adapter_directory(path: str) -> Path:
    """The same of a LoRA adapter."""
    return _directory(path, "adapter", "adapter_config.json")


def _directory(path: str, what: str, described_by: str) -> Path:
    if path.startswith(_ZOO):
        from zoo import registry

        directory = registry.weights_dir(path.removeprefix(_ZOO))
    else:
        directory = Path(path).expanduser()
    if not (directory / described_by).is_file():
        why = _reason(path, directory, described_by)
        raise FileNotFoundError(f"no {what} at {directory} (`{path}`): {why}")
    return directory


def _reason(path: str, directory: Path, described_by: str) -> str:
    if directory.is_dir():
        return f"it has no {described_by}"
    if _HUB_ID.fullmatch(path) is None:
        # By its name: on a Ray cluster who reads this is on another one, where the directory may well be.
        return f"there is no such directory on this machine ({platform.node()})"
    return (
        "there is no such directory, and nothing is downloaded: if it is one of the Hub's, fetch it with "
        f"`hf download {path} --local-dir DIRECTORY`, and name the directory"
    )
