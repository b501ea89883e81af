"""Starting a Ray of one's own, or joining the cluster that RAY_ADDRESS names."""

from __future__ import annotations

import importlib
import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from rich.console import Console

from cluster.config import FlotillaConfig
from cluster.placement import lacks, plan_cell, reserved_cpus
from cluster.priority import use_ordinary_priority
from cluster.process_environment import take_on
from deployments.joining import join
from deployments.preflight import StartError

psutil: Any = importlib.import_module("psutil")  # it comes without types

_ROOT = Path(__file__).resolve().parents[1]
#: On a machine that is short of something at the moment Ray's processes may be too late for each other.
_ATTEMPTS = 2
#: For processes of a start that was interrupted.
_LOOKS = 3


def start_ray(config: FlotillaConfig, console: Console) -> None:
    """Connect this process to Ray; nothing where it is connected already.

    Raises:
        StartError: if there is no cluster at RAY_ADDRESS, a Ray of one's own does not start, or this machine
            lacks what `config` asks for.
    """
    if ray.is_initialized():
        return
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    take_on()
    use_ordinary_priority()
    if "RAY_ADDRESS" in os.environ:
        try:
            join(os.environ["RAY_ADDRESS"])
        except (ConnectionError, ValueError) as error:
            raise StartError(
                f"RAY_ADDRESS is {os.environ['RAY_ADDRESS']!r}, and there is no Ray cluster to connect to: "
                f"{error}. Without RAY_ADDRESS `flotilla serve` starts a Ray of its own"
            ) from None
        return
    _begin_own(max(os.cpu_count() or 1, math.ceil(reserved_cpus(config))), console)
    if missing := lacks(plan_cell(config), ray.nodes()[0]):
        raise StartError(
            f"this machine lacks {missing}: ask for less in `placement`, or start a Ray cluster that has it "
            "and name it in RAY_ADDRESS"
        )


def _begin_own(num_cpus: int, console: Console) -> None:
    """Reservations are about placement on a cluster: here they must keep from no start and no rollout."""
    for attempts_left in reversed(range(_ATTEMPTS)):
        try:
            with _whole_or_not_at_all():
                ray.init(
                    "local",  # a new one, also where `ray start` has left one on this machine
                    num_cpus=num_cpus,
                    include_dashboard=False,
                    # Messages travel over TCP; the object store holds next to nothing.
                    object_store_memory=200 << 20,
                    logging_level=logging.ERROR,
                    log_to_driver=False,
                )
            return
        except Exception as error:  # Ray has no class for it: some of its failures are just `Exception`
            reason = " ".join(str(error).split())
            if not attempts_left:
                raise StartError(
                    f"Ray did not start in {_ATTEMPTS} attempts: {reason} Its processes' logs are below "
                    "/tmp/ray/session_latest/logs. Usual reasons: too little memory, a full disk, too few "
                    "processes allowed (`ulimit -u`)"
                ) from error
            console.print(
                f"warning: Ray did not start, and is started once more: {reason}",
                style="yellow",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )


@contextmanager
def _whole_or_not_at_all() -> Iterator[None]:
    """Who is interrupted while it starts Ray leaves none of it; Ray forgets agents that its raylet began."""
    before = set(psutil.Process().children(recursive=True))
    try:
        yield
    except BaseException:
        for _ in range(_LOOKS):  # one that is not ended yet may begin another
            left = set(psutil.Process().children(recursive=True)) - before
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=1.0)
        raise
