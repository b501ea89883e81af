"""Joining a Ray cluster that is there already."""

from __future__ import annotations

import importlib
import logging
import socket
from typing import Any

#: For a machine of the network to answer.
_LOOK_S = 10.0


def join(address: str) -> None:
    """Connect this process to the cluster at an address, as Ray takes it in RAY_ADDRESS.

    Raises:
        ConnectionError: nobody answers there, or whoever does lets nobody in without a token.
        ValueError: it is no address.
    """
    import ray

    _look_for(address)
    try:
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
    except ConnectionError as error:
        raise ConnectionError(
            f"{error}. If its nodes ask for a token, as those of `ray start` do where there is one in "
            "~/.ray/auth_token, have it there on this machine too, and set RAY_AUTH_MODE=token"
        ) from error


def _look_for(address: str) -> None:
    """Raise `ConnectionError` where no Ray answers at an address: Ray itself tries again for minutes.

    So it is with one that `flotilla serve` started by itself, which listens on the loopback address only:
    Ray finds its port, and asks at the machine's other address.
    """
    if "://" in address:  # Ray's client, which gives up in time
        return
    # Ray says by no public name which cluster it would join.
    services: Any = importlib.import_module("ray._private.services")
    found = services.canonicalize_bootstrap_address(address)
    if found is None:  # "local": a Ray of one's own
        return
    host, _, port = found.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _LOOK_S).close()
    except OSError as error:
        raise ConnectionError(f"nobody answers at {found} ({error.strerror or error})") from None
