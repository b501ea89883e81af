"""Settings every test relies on, made before anything imports Ray, torch or Transformers."""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.quick_interpreter import make_quick

ROOT = Path(__file__).resolve().parents[1]
SYSTEM = "tests/system"
# Of thorough runs. Long, and two tests: pytest-xdist gives out modules with few tests last, when nothing runs
# beside.
LONG = "tests/simulator/test_fair_overload.py"

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
# Models that passed their self-test in one process need not in the next; what users have is left alone.
_OWN_CACHE = None if "FLOTILLA_CACHE" in os.environ else tempfile.mkdtemp(prefix="flotilla-tests-")
os.environ.setdefault("FLOTILLA_CACHE", _OWN_CACHE or "")
# Each HTTP client reads the machine's certificates, whatever it is for: fifty milliseconds for a hundred of
# them, of which no test needs one.
if _OWN_CACHE is not None and find_spec("trustme"):
    import trustme

    os.environ["SSL_CERT_FILE"] = str(Path(_OWN_CACHE, "certificate.pem"))
    trustme.CA().cert_pem.write_to_path(os.environ["SSL_CERT_FILE"])
# Else each of the hundred processes that Ray starts compiles our modules anew, for a third of a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# And each process of the tests compiles all of them, and of ours: five seconds.
sys.dont_write_bytecode = False
# Before anything imports Triton: without a GPU its kernels run in its interpreter.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Modules are imported to collect the tests, and stay: the collector would walk them again and again.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough", action="store_true", help="run the long tests too, and properties with all examples"
    )


def pytest_configure(config: pytest.Config) -> None:
    if find_spec("hypothesis"):  # Where tests of a GPU run it may lack.
        from tests import examples

        examples.begin(thorough=config.getoption("thorough"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves long tests out, unless they are named or a thorough run is asked for."""
    if config.getoption("thorough") or any("::" in named for named in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("thorough")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]


def pytest_collection_finish() -> None:
    # pytest adds its handlers to each logger that does not propagate, six times a test; torch has fifty.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True
    # Each call of a command in a test would make all of them anew from their signatures: 0.1 s.
    testing: Any = sys.modules.get("typer.testing")
    if hasattr(testing, "_get_command"):
        testing._get_command = functools.cache(testing._get_command)
    # Each model that is loaded would run a forward of every small number of rows, to be quick with the first.
    warm_up: Any = sys.modules.get("engine.warm_up")
    if warm_up is not None:
        warm_up.WARM_ROWS = 4
    if "hypothesis" in sys.modules:
        from tests import examples

        examples.tell_of_utf_8()
    gc.freeze()
    gc.enable()
    make_quick()


def pytest_unconfigure() -> None:
    # Else pytest walks them five times for exceptions that nobody could raise, and that are ignored here.
    gc.freeze()
    atexit.register(gc.unfreeze)
    if _OWN_CACHE is not None:
        shutil.rmtree(_OWN_CACHE, ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Shares out tests over processes: a module stays whole, so that its fixtures are made once.

    All that start Ray go to one process, and first: no two Ray systems run at a time. pytest-xdist's own
    `--dist loadgroup` would do it by marks, which 3.8 loses with pytest 9.2 without a word (its issue 1386).
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByModule(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.split("::", 1)[0]
            return SYSTEM if module.startswith(f"{SYSTEM}/") else module

        def _assign_work_unit(self, node: Any) -> None:
            for first in (LONG, SYSTEM):
                if first in self.workqueue:
                    self.workqueue.move_to_end(first, last=False)
            super()._assign_work_unit(node)

    return None if config.getvalue("dist") == "each" else ByModule(config, log)
