"""The priority of workers, beside other programs of the machine."""

from __future__ import annotations

import os

_NICENESS = "RAY_worker_niceness"


def use_ordinary_priority() -> None:
    """Have a Ray that this process starts give its workers the priority of other programs.

    By itself it makes them `nice` 15, as jobs that may wait: beside a program that keeps a core busy, be it
    a client on the same machine, they get 3 % of it (docs/decisions/0045). Whoever sets Ray's own variable,
    `RAY_worker_niceness`, has it as it says.
    """
    os.environ.setdefault(_NICENESS, "0")
