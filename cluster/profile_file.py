"""The cost profile on disk: what was measured where, and whether it fits a configuration."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from cluster.config import FlotillaConfig, TargetConfig
from cluster.cost_model import CostProfile
from cluster.drafter_config import BesideTargetConfig, DrafterConfig
from cluster.linear_cost import LinearCost, StepPoint
from cluster.model_paths import model_directory

# Raised whenever the meaning of a field changes; no other version is read.
VERSION = 2
PACKAGES = ("flotilla", "numpy", "torch", "transformers")
# The target's name beside its drafters'.
TARGET = "target"
# Of a model's configuration, what says nothing of what its forwards cost.
_IRRELEVANT = ("_name_or_path", "transformers_version")


class ProfileError(ValueError):
    """A cost profile cannot be used; the message says why and what to do."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What forwards were measured on.

    Attributes:
        processor: model of the CPU.
        num_cpus: its cores, as far as this process sees them.
        torch_threads: threads of one forward.
        gpus: models of the GPUs; empty without any.
    """

    processor: str
    num_cpus: int
    torch_threads: int
    gpus: list[str]

    @property
    def hardware(self) -> str:
        """For people: the CPU, and the GPUs beside it."""
        return " with ".join([self.processor, *([", ".join(self.gpus)] if self.gpus else [])])


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What must be the same for a profile to hold.

    Attributes:
        kind: "target", or the drafter's kind.
        path: as configured, for people; models of one architecture cost the same wherever they lie.
        config_hash: SHA-256 of the model's config.json, or of what configures a drafter without a model.
        dtype, runner, tensor_parallel, quantization: as configured; empty, 1 and None without a model.
    """

    kind: str
    path: str
    config_hash: str
    dtype: str = ""
    runner: str = ""
    tensor_parallel: int = 1
    quantization: str | None = None


class FitQuality(msgspec.Struct, frozen=True, kw_only=True):
    """Relative errors |predicted / measured - 1| on held-out points.

    Attributes:
        num_fitted, num_held_out: points.
        median, p90, worst: of the errors.
    """

    num_fitted: int
    num_held_out: int
    median: float
    p90: float
    worst: float


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """A fitted model and which points it was not fitted to.

    Attributes:
        cost: the coefficients.
        quality: its errors on the held-out points.
        held_out: per point, whether it was held out.
    """

    cost: LinearCost
    quality: FitQuality
    held_out: list[bool]


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One model's measurement.

    Attributes:
        model: whose.
        cost: fitted coefficients.
        quality: errors on held-out points.
        points: all forwards measured.
        held_out: per point, whether the fit did not see it.
    """

    model: ModelIdentity
    cost: LinearCost
    quality: FitQuality
    points: list[StepPoint]
    held_out: list[bool]

    @classmethod
    def of(cls, model: ModelIdentity, points: list[StepPoint], fit: Fit) -> ModelProfile:
        """From a fit to the points."""
        return cls(model=model, cost=fit.cost, quality=fit.quality, points=points, held_out=fit.held_out)


class ProfileFile(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `flotilla profile` writes.

    Attributes:
        version: of this format.
        created: when, ISO 8601 in UTC.
        clock: "cpu" for processor time of the measuring thread, "wall" for wall time.
        machine: on what.
        packages: versions of the libraries that matter.
        target: the target's profile.
        drafters: the drafters', by name in the configuration.
    """

    version: int
    created: str
    clock: str
    machine: Machine
    packages: dict[str, str]
    target: ModelProfile
    drafters: dict[str, ModelProfile]

    @property
    def models(self) -> dict[str, ModelProfile]:
        """All of them by name, the target first."""
        return {TARGET: self.target, **self.drafters}

    def save(self, path: Path) -> None:
        """Write it, for people to read too."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def new_profile(clock: str, target: ModelProfile, drafters: dict[str, ModelProfile]) -> ProfileFile:
    """A profile measured here and now."""
    return ProfileFile(
        version=VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        clock=clock,
        machine=this_machine(),
        packages=this_software(),
        target=target,
        drafters=drafters,
    )


def read_profile(path: Path) -> ProfileFile:
    """The profile in a file.

    Raises:
        ProfileError: if it cannot be read, is no profile, or is one of another version.
    """
    try:
        raw = json.loads(path.read_bytes())
    except OSError as error:
        raise ProfileError(
            f"no cost profile at {path} on {platform.node()} ({error.strerror}); {_remedy(path)}"
        ) from None
    except ValueError as error:
        raise ProfileError(f"{path} is no cost profile: it is not JSON ({error})") from None
    version = raw.get("version") if isinstance(raw, dict) else None
    if version != VERSION:
        found = "none" if version is None else version
        raise ProfileError(
            f"{path} is a cost profile of another version ({found}, not {VERSION}); {_remedy(path)}"
        )
    try:
        return msgspec.convert(raw, ProfileFile)
    except msgspec.ValidationError as error:
        raise ProfileError(f"{path} is no cost profile: {error}; {_remedy(path)}") from None


def load_profile(path: Path, config: FlotillaConfig) -> tuple[CostProfile, list[str]]:
    """The costs of a configuration's models from a file, and warnings for people.

    Drafters that the configuration does not have are left out.

    Raises:
        ProfileError: as `read_profile`, or if it is a profile of other models, or lacks a drafter.
    """
    profile = read_profile(path)
    if not profile.target.cost.seconds(1, 1, 0) > 0.0:
        raise ProfileError(f"{path} says that the target's forwards take no time; {_remedy(path)}")
    _compare(path, "the target", profile.target.model, identify_target(config.target))
    drafters = {}
    for drafter in config.drafters:
        found = profile.drafters.get(drafter.name)
        if found is None:
            there = ", ".join(profile.drafters) or "none"
            raise ProfileError(
                f"{path} has no costs of drafter `{drafter.name}` (it has {there}); {_remedy(path)}"
            )
        _compare(path, f"drafter `{drafter.name}`", found.model, identify_drafter(drafter))
        drafters[drafter.name] = found.cost
    return CostProfile(target=profile.target.cost, drafters=drafters), warnings(path, profile)


def warnings(path: Path, profile: ProfileFile) -> list[str]:
    """Sentences on what differs between where the profile was measured and here."""
    told = []
    here = this_machine()
    for name in Machine.__struct_fields__:
        was, now = getattr(profile.machine, name), getattr(here, name)
        if was != now:
            told.append(f"{path} was measured on other hardware: {name} was {was!r} and is {now!r}")
    for package, now in this_software().items():
        was = profile.packages.get(package, "none")
        if was != now:
            told.append(f"{path} was measured with {package} {was}; installed is {now}")
    return told


def identify_target(config: TargetConfig) -> ModelIdentity:
    """What the configured target is; `FileNotFoundError` or `KeyError` if it is not there."""
    return ModelIdentity(
        kind="target",
        path=config.path,
        config_hash=_model_hash(config.path),
        dtype=config.dtype,
        runner=config.runner,
        tensor_parallel=config.tensor_parallel,
        quantization=config.quantization,
    )


def identify_drafter(config: DrafterConfig) -> ModelIdentity:
    """What the configured drafter is; `FileNotFoundError` or `KeyError` if its model is not there."""
    if config.kind == "model":
        return ModelIdentity(
            kind=config.kind,
            path=config.path,
            config_hash=_model_hash(config.path),
            dtype=config.dtype,
            runner=config.runner,
            quantization=config.quantization,
        )
    if isinstance(config, BesideTargetConfig):
        return ModelIdentity(kind=config.kind, path=config.path, config_hash=_model_hash(config.path))
    settings = config.model_dump(exclude={"name", "max_requests", "replicas", "placement"})
    return ModelIdentity(kind=config.kind, path="", config_hash=_hash(settings))


def this_machine() -> Machine:
    """The machine this process runs on. Imports no torch: the scheduler asks too."""
    return Machine(
        processor=_processor(),
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        torch_threads=int(os.environ.get("FLOTILLA_TORCH_THREADS", "1")),
        gpus=_gpus(),
    )


def this_software() -> dict[str, str]:
    """Versions of the packages that forwards depend on, of those that are installed.

    From a checkout that is only on the path Flotilla itself runs without being one.
    """
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _compare(path: Path, whose: str, measured: ModelIdentity, configured: ModelIdentity) -> None:
    for name in ("kind", "config_hash", "dtype", "runner", "tensor_parallel", "quantization"):
        was, now = getattr(measured, name), getattr(configured, name)
        if was == now:
            continue
        if name == "config_hash":
            raise ProfileError(
                f"{path} was measured with another model as {whose}: `{measured.path}`, whose configuration "
                f"is not that of `{configured.path}`; {_remedy(path)}"
            )
        raise ProfileError(
            f"{path} was measured with {name} {was!r} for {whose}, configured is {now!r}; {_remedy(path)}"
        )


def _remedy(path: Path) -> str:
    return f"measure anew with `flotilla profile --json {path}` and this configuration"


def _model_hash(path: str) -> str:
    config = json.loads((model_directory(path) / "config.json").read_text())
    return _hash({key: value for key, value in config.items() if key not in _IRRELEVANT})


def _hash(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """Models of NVIDIA's GPUs, as its driver tells them."""
    found = []
    for info in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = dict(line.partition(":")[::2] for line in info.read_text().splitlines())
        found.append(lines.get("Model", "unknown").strip())
    return found
