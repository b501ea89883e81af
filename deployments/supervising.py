"""Ends processes of the system that are stopped or stuck, so that Ray Serve replaces them."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from typing import Any

import ray

from cluster.members import Member
from cluster.supervision import Supervisor

psutil: Any = importlib.import_module("psutil")  # it comes without types

_log = logging.getLogger(__name__)

LOOK_S = 0.5


def identity() -> dict[str, str]:
    """By what this process, a Ray actor, can be ended from elsewhere; for `Member.details`."""
    context = ray.get_runtime_context()
    return {
        "pid": str(os.getpid()),
        "began": repr(psutil.Process().create_time()),
        "ray_node": str(context.get_node_id()),
        "actor": context.get_actor_name() or "",
        "namespace": context.namespace,
    }


async def supervise(supervisor: Supervisor) -> None:
    """Look for members that are overdue, and end them; never returns.

    Ray Serve notices a dead replica with its next check. One that does not answer it takes a minute and a
    half to give up, and then waits for it to shut down in order.
    """
    while True:
        await asyncio.sleep(LOOK_S)
        for member in supervisor.look():
            _log.error("%s %s no longer reports; ending its process", member.kind, member.id)
            try:
                await asyncio.to_thread(end, member)
            except Exception:  # Ray, or the process table: whatever it is, Ray Serve's own checks remain
                _log.exception("%s %s could not be ended", member.kind, member.id)


def end(member: Member) -> None:
    """Kill a member's process; nothing if it is gone already."""
    details = member.details
    if details.get("ray_node") == ray.get_runtime_context().get_node_id():
        try:
            process = psutil.Process(int(details["pid"]))
            # Else the number is another process's by now.
            if repr(process.create_time()) == details["began"]:
                process.kill()
        except psutil.NoSuchProcess:
            return
        return
    if details.get("actor"):
        try:
            actor = ray.get_actor(details["actor"], namespace=details["namespace"])
        except ValueError:
            return
        # Ray asks it to end, and has it killed when it has not reacted for five seconds.
        ray.kill(actor)
