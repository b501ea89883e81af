"""Which build of torch gets installed where, with pip and nvidia-smi replaced by scripts that take notes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "install_torch.sh"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# Answers the range and "nothing installed"; pip succeeds when $PIP_FINDS occurs among its arguments.
FAKE_PYTHON = f"""#!/bin/sh
case "$*" in
    *--is-installed*) exit "$TORCH_MISSING" ;;
    *torch_requirement.py*) exec "{sys.executable}" "$@" ;;
    *) echo "$*" >> "$CALLS"; case "$*" in *"$PIP_FINDS"*) exit 0 ;; *) exit 1 ;; esac ;;
esac
"""


class Machine:
    """A machine described by what pip finds and whether a GPU answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        self.calls.touch()
        self._script("python", FAKE_PYTHON)

    def _script(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)

    def install(
        self,
        *,
        finds: str,
        has_gpu: bool = False,
        is_installed: bool = False,
        torch: str = "",
        system: str = "Linux",
    ) -> tuple[list[str], str]:
        """The pip commands run, and what was written to stderr."""
        self._script("nvidia-smi", "#!/bin/sh\necho 'GPU 0: H200'\n" if has_gpu else "#!/bin/sh\nexit 9\n")
        self._script("uname", f"#!/bin/sh\necho {system}\n")
        environment = {
            **os.environ,
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "PIP_FINDS": finds,
            "TORCH_MISSING": "0" if is_installed else "1",
            "TORCH": torch,
        }
        done = subprocess.run(
            [SCRIPT, self.folder / "python"], env=environment, capture_output=True, text=True, check=True
        )
        return self.calls.read_text().splitlines(), done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_torch_in_range_is_kept(machine: Machine) -> None:
    calls, _ = machine.install(finds="torch", is_installed=True)
    assert calls == []


def test_without_a_gpu_the_configured_index_is_asked_for_a_cpu_build(machine: Machine) -> None:
    calls, stderr = machine.install(finds="+cpu")
    assert len(calls) == 1
    assert stderr == ""


def test_then_the_index_of_pytorch(machine: Machine) -> None:
    calls, stderr = machine.install(finds=CPU_INDEX)
    assert len(calls) == 2
    assert CPU_INDEX in calls[1]
    assert stderr == ""


def test_then_the_plain_wheel_with_a_warning(machine: Machine) -> None:
    calls, stderr = machine.install(finds="-qq torch<")
    assert len(calls) == 3
    assert "no CPU build" in stderr


def test_with_a_gpu_the_plain_wheel_is_taken_at_once(machine: Machine) -> None:
    calls, _ = machine.install(finds="torch", has_gpu=True)
    assert len(calls) == 1
    assert "cpu" not in calls[0]


def test_elsewhere_than_linux_the_plain_wheel_is_the_cpu_build(machine: Machine) -> None:
    calls, _ = machine.install(finds="torch", system="Darwin")
    assert len(calls) == 1
    assert "cpu" not in calls[0]


def test_a_named_build_wins_over_an_installed_one(machine: Machine) -> None:
    calls, _ = machine.install(finds="torch==2.12.0", is_installed=True, torch="torch==2.12.0")
    assert len(calls) == 1


def test_an_interpreter_in_a_folder_with_spaces_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    python = folder / "python3"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    found = subprocess.run(
        [SCRIPT.with_name("find_python.sh")],
        env={**os.environ, "PYTHON": str(python)},
        capture_output=True,
        text=True,
    )
    assert (found.returncode, found.stdout.strip()) == (0, str(python)), found.stderr
