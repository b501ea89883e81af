"""Print the torch range of pyproject.toml; with --is-installed, exit 0 if the installed torch lies in it.

Runs before anything is installed, hence the standard library and pip's own copy of packaging.
"""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement


def torch_requirement() -> Requirement:
    """The one dependency of the project that is called torch."""
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    requirements = [Requirement(line) for line in pyproject["project"]["dependencies"]]
    return next(requirement for requirement in requirements if requirement.name == "torch")


def is_installed() -> bool:
    """Whether this interpreter has a torch in range."""
    try:
        return torch_requirement().specifier.contains(version("torch"), prereleases=True)
    except PackageNotFoundError:
        return False


if __name__ == "__main__":
    if sys.argv[1:] == ["--is-installed"]:
        raise SystemExit(0 if is_installed() else 1)
    print(torch_requirement())
