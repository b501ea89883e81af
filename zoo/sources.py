"""Where the corpus comes from: which packages, under which licences, and which modules are held out.

Everything is taken from the running interpreter, so any machine with the project installed can rebuild the
corpus; packages that are absent are skipped.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Import name -> licence (SPDX) of every package whose source text goes into the corpus. All permissive.
PACKAGES: dict[str, str] = {
    "accelerate": "Apache-2.0",
    "aiohttp": "Apache-2.0",
    "anyio": "MIT",
    "attr": "MIT",
    "click": "BSD-3-Clause",
    "cryptography": "Apache-2.0 OR BSD-3-Clause",
    "dateutil": "Apache-2.0 OR BSD-3-Clause",
    "fastapi": "MIT",
    "fontTools": "MIT",
    "fsspec": "BSD-3-Clause",
    "google": "Apache-2.0",
    "grpc": "Apache-2.0",
    "h11": "MIT",
    "httpx": "BSD-3-Clause",
    "huggingface_hub": "Apache-2.0",
    "jinja2": "BSD-3-Clause",
    "jsonschema": "MIT",
    "markdown_it": "MIT",
    "matplotlib": "PSF-2.0 based",
    "mpmath": "BSD-3-Clause",
    "msgspec": "BSD-3-Clause",
    "mypy": "MIT",
    "networkx": "BSD-3-Clause",
    "numpy": "BSD-3-Clause",
    "openai": "Apache-2.0",
    "opentelemetry": "Apache-2.0",
    "packaging": "Apache-2.0 OR BSD-2-Clause",
    "PIL": "MIT-CMU",
    "prometheus_client": "Apache-2.0",
    "pydantic": "MIT",
    "pygments": "BSD-2-Clause",
    "pyparsing": "MIT",
    "pytest": "MIT",
    "_pytest": "MIT",
    "ray": "Apache-2.0",
    "requests": "Apache-2.0",
    "rich": "MIT",
    "scipy": "BSD-3-Clause",
    "setuptools": "MIT",
    "smart_open": "MIT",
    "starlette": "BSD-3-Clause",
    "sympy": "BSD-3-Clause",
    "torch": "BSD-3-Clause",
    "transformers": "Apache-2.0",
    "typer": "MIT",
    "urllib3": "MIT",
    "uvicorn": "BSD-3-Clause",
    "websockets": "BSD-3-Clause",
    "yaml": "MIT",
    "yarl": "Apache-2.0",
}

#: Licence of the standard library.
STDLIB_LICENCE = "PSF-2.0"

#: Folder and file stems never read: tests, vendored copies, generated code, lookup tables, relics.
_SKIP_PARTS = frozenset(
    (
        *("test", "tests", "testing", "_testing", "conftest", "benchmarks", "examples", "_examples"),
        *("_vendor", "vendored", "thirdparty", "thirdparty_files", "third_party", "externals", "extern"),
        *("_generated", "generated", "encodings", "pydoc_data", "_dtypes", "_inductor_generated", "typeshed"),
        *("site-packages", "__pycache__", "idlelib", "lib2to3", "turtledemo", "msvc9compiler"),
    )
)
_SKIP_SUFFIXES = ("_pb2", "_pb2_grpc", "_tests", "_test", "_data", "_tables", "lextab", "parsetab")

#: Share of modules held out, in percent.
HELD_OUT_PERCENT = 3

_MAX_FILE_BYTES = 600_000


@dataclass(frozen=True)
class Module:
    """One source file: dotted module name, path, and the top-level package (``stdlib`` for the standard
    library).
    """

    name: str
    path: Path
    package: str


def is_held_out(module: str) -> bool:
    """Whether a module belongs to the held-out split.

    The rule is the SHA-256 of the dotted module name, first four bytes as a big-endian integer, modulo 100,
    below ``HELD_OUT_PERCENT``. It depends on nothing but the name, so every machine and every version
    splits alike.
    """
    digest = hashlib.sha256(module.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def _skipped(relative: Path) -> bool:
    parts = (*relative.parts[:-1], relative.stem)
    if any(part in _SKIP_PARTS or part.startswith("test_") for part in parts):
        return True
    return relative.stem.endswith(_SKIP_SUFFIXES)


def _walk(root: Path, base: Path, package: str) -> Iterator[Module]:
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(base)
        if _skipped(relative) or path.stat().st_size > _MAX_FILE_BYTES:
            continue
        parts = relative.parts[:-1] if path.stem == "__init__" else (*relative.parts[:-1], path.stem)
        if parts:
            yield Module(".".join(parts), path, package)


def modules() -> Iterator[Module]:
    """All source files of the corpus, in a fixed order."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    yield from _walk(stdlib, stdlib, "stdlib")
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None:
            continue
        for location in spec.submodule_search_locations or ():
            root = Path(location)
            if root.is_dir():
                yield from _walk(root, root.parent, package)
