"""Processes of the test's own server, to be killed: others on the machine may belong to somebody's server."""

from __future__ import annotations

from contextlib import suppress

import psutil


def own_processes(kind: str) -> list[int]:
    """Ids of descendants of this process whose command line has `kind`, as Ray's workers have their class.

    Tests start Ray themselves, so that all its workers descend from them, also those started later.
    """
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            if child.status() != psutil.STATUS_ZOMBIE and kind in " ".join(child.cmdline()):
                found.append(child.pid)
    return found
