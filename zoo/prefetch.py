"""Batches made ahead by a thread, so that a GPU does not wait for numpy."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


@contextmanager
def prefetched(items: Iterator[Item], depth: int = 8) -> Iterator[Iterator[Item]]:
    """The same items in the same order, up to ``depth`` made ahead within the block; what fails is raised."""
    made: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(depth)
    is_over = threading.Event()

    def put(item: Item | None, error: BaseException | None) -> None:
        while not is_over.is_set():
            try:
                made.put((item, error), timeout=0.1)
                return
            except queue.Full:
                continue

    def make() -> None:
        try:
            for item in items:
                put(item, None)
                if is_over.is_set():
                    return
            put(None, StopIteration())
        except BaseException as error:
            put(None, error)

    def take() -> Iterator[Item]:
        while True:
            item, error = made.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            assert item is not None
            yield item

    thread = threading.Thread(target=make, daemon=True, name="prefetch")
    thread.start()
    try:
        yield take()
    finally:
        is_over.set()
        thread.join()
