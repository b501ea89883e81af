"""Settings every test relies on, made before anything imports Ray, torch or Transformers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

os.environ.update(
    RAY_USAGE_STATS_ENABLED="0",
    # One thread per process, as in production: on few cores, threads of several workers fight.
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    # Ray's workers import the packages from here.
    PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups for `make test`'s two processes: a module stays whole, so that its fixtures are made once.

    All that start Ray are one group: no two Ray systems run at a time.
    """
    for item in items:
        system = "system" in item.path.relative_to(ROOT / "tests").parts
        item.add_marker(pytest.mark.xdist_group("system" if system else item.path.stem))
