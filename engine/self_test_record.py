"""Which models passed their self-test on this machine, so that a restart need not repeat it."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import msgspec
import torch

from engine.caches import cache_directory
from engine.runner_options import RunnerOptions
from engine.stored_llama import StoredConfig

_LIBRARIES = ("torch", "transformers", "safetensors", "numpy", "triton", "flashinfer-python")


class _Passed(msgspec.Struct, frozen=True):
    """What is kept: a digest of all that a self-test depends on, and how the weights are read."""

    digest: str
    config: StoredConfig


class SelfTestRecord:
    """Says whether a model passed, loaded in the same way, by the same code, on the same kind of device.

    Comparing takes the plain Transformers model, whose import and weights are most of what a start takes. The
    same files give the same weights, and the same code on the same device computes the same with them: what
    passed once need not be compared again. Any other file, code, library or device is another question.
    """

    def __init__(self, directory: Path, device: torch.device, options: RunnerOptions) -> None:
        """Of the model in `directory`, on `device`."""
        home = cache_directory()
        how = repr((str(directory.resolve()), platform.node(), str(device), asdict(options)))
        self._file = None if home is None else home / "self-tests" / f"{_hash(how.encode())[:32]}.json"
        adapters = [_files(Path(path)) for _, path in options.adapters]
        everything = (how, _device(device), _versions(), _sources(), _files(directory), adapters)
        self._digest = _hash(repr(everything).encode())

    def recall(self) -> StoredConfig | None:
        """How to read the weights, if the model passed."""
        if self._file is None:
            return None
        try:
            passed = msgspec.json.decode(self._file.read_bytes(), type=_Passed)
        except (OSError, msgspec.DecodeError):
            return None
        return passed.config if passed.digest == self._digest else None

    def keep(self, config: StoredConfig) -> None:
        """The model passed. Where nothing can be written, the next start tests it again."""
        if self._file is None:
            return
        own = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            own.write_bytes(msgspec.json.encode(_Passed(self._digest, config)))
            own.replace(self._file)
        except OSError:
            with suppress(OSError):
                own.unlink()


def _device(device: torch.device) -> tuple[str, ...]:
    instructions = torch.backends.cpu.get_cpu_capability()
    cpu = (platform.machine(), instructions, f"{torch.get_num_threads()} threads")
    if device.type != "cuda":
        return cpu
    gpu = torch.cuda.get_device_properties(device)
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    kind = f"{name}, {capability}, {gpu.total_memory} bytes, {gpu.multi_processor_count} processors"
    return (*cpu, kind, str(torch.version.cuda))


@functools.cache
def _versions() -> tuple[str, ...]:
    found = [platform.python_version()]
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return tuple(found)


@functools.cache
def _sources() -> str:
    """Hash of this package: what computes, and what compares."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _files(directory: Path) -> list[tuple[object, ...]]:
    """Of every file of a model, what changes when it is written or replaced."""
    found: list[tuple[object, ...]] = []
    for path in sorted(directory.iterdir()):
        if path.is_file():
            status = path.stat()
            found.append((path.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))
    return found


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
