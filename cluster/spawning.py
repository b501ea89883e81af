"""Making and ending the actors of workers, with the environment their processes run in."""

from __future__ import annotations

import contextlib
from typing import Any

import ray

from cluster.process_environment import worker_environment


def spawn(worker: type[Any], options: dict[str, Any], orphan_s: float | None = None) -> Any:
    """A new actor of a worker class, without Ray's own restarts and retries.

    Args:
        worker: its class.
        options: Ray's, that say what is reserved for it and where it runs.
        orphan_s: how long it outlives its cell, if `options` make it detached.
    """
    environment = worker_environment(options.get("num_gpus", 0.0))
    actor = ray.remote(worker).options(max_restarts=0, max_task_retries=0, **options)
    return actor.remote(orphan_s, environment)


def end(actor: Any) -> None:
    """End an actor; Ray has its process killed if it does not react for five seconds."""
    with contextlib.suppress(Exception):  # dead already, or Ray itself is going
        ray.kill(actor)


def this_node() -> str:
    """Ray's id of the node this process runs on; empty while Ray is going."""
    with contextlib.suppress(Exception):
        return str(ray.get_runtime_context().get_node_id())
    return ""
