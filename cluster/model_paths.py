"""Where a model named in the configuration lies."""

from __future__ import annotations

from pathlib import Path

_ZOO = "zoo:"


def model_directory(path: str) -> Path:
    """The directory of a configured model; `zoo:NAME` is one of the embedded demo family.

    Raises `FileNotFoundError` or `KeyError`, saying which directory or which names there are.
    """
    if path.startswith(_ZOO):
        from zoo import registry

        directory = registry.weights_dir(path.removeprefix(_ZOO))
    else:
        directory = Path(path).expanduser()
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"no model at {directory} (`{path}`): it has no config.json")
    return directory
