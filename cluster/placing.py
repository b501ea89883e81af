"""Where a worker's processes run, or what they wait for while they do not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from cluster.actors import Whereabouts
from cluster.reservation import Reservations
from cluster.worker import Worker

_log = logging.getLogger(__name__)

# A worker that has no process after so long is said to wait for one. What it reserves is there before it is
# asked for; several that start at once take a small machine ten seconds.
PATIENCE_S = 20.0
# And so often until then it is looked whether it still has a place.
CHECK_S = 1.0


@contextlib.asynccontextmanager
async def placing(worker: Worker, names: list[str], reservations: Reservations) -> AsyncIterator[None]:
    """While the body waits for the worker's actors to load, note where they run, or why they do not yet.

    Args:
        worker: whose actors were made; `where` and `waits_for` are kept up to date.
        names: of its processes, by rank.
        reservations: knows their places.
    """
    asked = [actor.where.remote() for actor in worker.actors]
    watch = asyncio.create_task(_watch(worker, names, asked, reservations))
    try:
        yield
        await watch
    finally:
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):  # of the actor: the body has it too
            await watch


async def _watch(worker: Worker, names: list[str], asked: list[Any], reservations: Reservations) -> None:
    answers = [asyncio.ensure_future(_answer(ref)) for ref in asked]
    try:
        begun = time.monotonic()
        while True:
            _, pending = await asyncio.wait(answers, timeout=CHECK_S)
            if not pending:
                worker.where = [answer.result() for answer in answers]
                worker.waits_for = ""
                return
            late = next(name for name, answer in zip(names, answers, strict=True) if not answer.done())
            if not await reservations.has_place(late):
                # Its node died after it was asked for. Ray would let it wait for the bundle: better to
                # give it up, so that it is made again where there is room (`Reservations.restore`).
                _log.warning("%s lost its place before it ran", late)
                worker.kill()
                return
            if time.monotonic() - begun < PATIENCE_S:
                continue
            waits_for = await reservations.explain_seat(late)
            if waits_for != worker.waits_for:
                _log.warning("%s is not running: %s", worker.name, waits_for)
                worker.waits_for = waits_for
    finally:
        for answer in answers:
            answer.cancel()


async def _answer(ref: Any) -> Whereabouts:
    where: Whereabouts = await ref
    return where
