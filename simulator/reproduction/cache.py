"""Results of points on disk, by what they depend on: setting, seed, recorded data and code."""

from __future__ import annotations

import ast
import hashlib
import os
from functools import cache
from pathlib import Path

import msgspec

from simulator.reproduction.setting import Setting

_ROOT = Path(__file__).resolve().parents[2]
_ENTRY = "simulator.reproduction.setting"


class Store:
    """A folder with a file per point."""

    def __init__(self, folder: Path, data: Path | None = None) -> None:
        self._folder = folder
        self._data = "" if data is None else "recorded"

    def key(self, setting: Setting, seed: int) -> str:
        """Of a point, for this code."""
        held = msgspec.json.encode([setting, seed, self._data if setting.traced else ""], order="sorted")
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
def code_version() -> str:
    """Hash of every module of ours that a run uses, found by following imports, and of the profiles."""
    found: set[Path] = set()
    pending = [_ENTRY]
    while pending:
        path = _file(pending.pop())
        if path is None or path in found:
            continue
        found.add(path)
        pending += _imports(path)
    simulator = _ROOT / "simulator"
    found.update(simulator.glob("*.json"), simulator.glob("profiles/*.json"))
    digest = hashlib.sha256()
    for path in sorted(found):
        digest.update(str(path.relative_to(_ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _file(module: str) -> Path | None:
    path = _ROOT.joinpath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def _imports(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names
