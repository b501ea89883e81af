"""Results of points on disk, by what they depend on: setting, seed, recorded data and code."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

import msgspec

from benchmarks.code_version import version_of
from simulator.reproduction.setting import Setting, recorded_file

_ROOT = Path(__file__).resolve().parents[2]
_ENTRY = "simulator.reproduction.setting"


class Store:
    """A folder with a file per point."""

    def __init__(self, folder: Path, data: Path | None = None) -> None:
        self._folder, self._data = folder, data

    def key(self, setting: Setting, seed: int) -> str:
        """Of a point, for this code and what its file of recorded data holds."""
        recorded = ""
        if setting.traced and self._data is not None:
            recorded = _content(recorded_file(setting, self._data))
        held = msgspec.json.encode([setting, seed, recorded], order="sorted")
        return hashlib.sha256(held + code_version().encode()).hexdigest()[:32]

    def get(self, key: str) -> dict[str, float] | None:
        """Its figures, if it was run."""
        try:
            return msgspec.json.decode(self._path(key).read_bytes(), type=dict[str, float])
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def put(self, key: str, figures: dict[str, float]) -> None:
        """Keep a point's figures; whole or not at all, should the process end meanwhile."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}")
        new.write_bytes(msgspec.json.encode(figures))
        new.replace(path)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"


@cache
def _content(path: Path) -> str:
    """Hash of a file; of one that is not there, which no run gets past, its name."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else path.name


@cache
def code_version() -> str:
    """Hash of every module of ours that a run uses, and of the profiles."""
    simulator = _ROOT / "simulator"
    return version_of(_ENTRY, [*simulator.glob("*.json"), *simulator.glob("profiles/*.json")])
