"""Which weights a cell's models have: the path of a directory does not tell what is in it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from benchmarks.demo import directory
from cluster.config import FlotillaConfig

# Of the beginning and end of each file, which differ where training went on; whole files of a large model
# would take minutes to read.
_ENDS_BYTES = 1 << 20


def fingerprints(config: FlotillaConfig) -> dict[str, str]:
    """By path, as configured, 12 hexadecimal digits of the target's and the drafters' weights.

    Paths that do not exist are left out: whoever serves them says so.
    """
    paths = [config.target.path, *(getattr(drafter, "path", None) for drafter in config.drafters)]
    found = {}
    for path in dict.fromkeys(map(str, filter(None, paths))):
        folder = Path(directory(path))
        if folder.is_dir():
            found[path] = fingerprint(folder)
    return found


def fingerprint(folder: Path) -> str:
    """12 hexadecimal digits of the names, sizes, beginnings and ends of the weight files in a directory."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_ENDS_BYTES))
            file.seek(max(0, size - _ENDS_BYTES))
            digest.update(file.read(_ENDS_BYTES))
    return digest.hexdigest()[:12]
