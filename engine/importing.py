"""What stays for good, kept from the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Import inside without the garbage collector, to which what was imported is then no longer shown.

    Torch and Transformers make objects by the hundred thousand that all stay. Walking them again and again
    while they come is about a fifth of the processor time of importing them, and finds nothing. Does nothing
    where the collector is off already.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def settle() -> None:
    """What lives now lives on: the garbage collector need not walk it again in the middle of a step."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
