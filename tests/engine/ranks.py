"""Two ranks of tensor parallelism, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from typing import Any

from engine import warm_up
from engine.tensor_parallel import join, leave


def on_two_ranks(compute: Callable[[int, list[str]], Any], directories: list[str]) -> tuple[Any, Any]:
    """What each rank's process computes, given its rank and the models' directories.

    Args:
        compute: of a module, so that another process finds it.
        directories: of the models.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # One process imports torch and Transformers for all ranks of all tests, five seconds of a core, and what
    # the first of these tests need beside, four more.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["engine.loading", "transformers.models.auto.modeling_auto", compute.__module__]
    )
    results = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(compute, rank, port, directories, results)) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        by_rank = dict(results.get(timeout=120) for _ in ranks)
    finally:
        for process in ranks:
            process.join(timeout=20)
            process.kill()
    for found in by_rank.values():
        assert not isinstance(found, str), found
    return by_rank[0], by_rank[1]


def _rank(
    compute: Callable[[int, list[str]], Any], rank: int, port: int, directories: list[str], results: Any
) -> None:
    warm_up.WARM_ROWS = 4  # as in the tests' own process
    try:
        join(rank, 2, "127.0.0.1", port)
        found = compute(rank, directories)
        leave()
        results.put((rank, found))
    except BaseException as error:
        results.put((rank, repr(error)))
        raise
