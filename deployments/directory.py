"""The directory of a running system: a Ray Serve deployment that cells and front ends report to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from cluster.members import REPORT_INTERVAL_S, SILENT_S, UNHEARD_S, Member, MemberList
from cluster.supervision import Supervisor
from deployments.abandoned_groups import AbandonedGroups, free_abandoned
from deployments.supervising import LOOK_S, supervise

_log = logging.getLogger(__name__)

DIRECTORY_NAME = "Directory"
_CALL_TIMEOUT_S = 2.0
_PAUSE_S = 0.05

#: For so long after the first report, a directory waits for those of the others; less than calls may take.
_HEARING_S = 1.0


class Directory:
    """Knows every member of the system that has reported within the last seconds (one replica).

    It keeps nothing that is not reported again within a second. After its restart it answers nobody until
    all have had time to report, and meanwhile front ends go on with the cells they know.

    Args:
        silent_s: a member is no longer named once it has been silent for so long.
        end_after_s: and its process is ended after so long; never if None.
        free_after_s: placement groups that no cell has named for so long are freed; never if None.
    """

    def __init__(
        self,
        silent_s: float = SILENT_S,
        end_after_s: float | None = None,
        free_after_s: float | None = None,
    ) -> None:
        self._list = MemberList(silent_s)
        self._supervisor = None if end_after_s is None else Supervisor(end_after_s, LOOK_S)
        self._groups = None
        if free_after_s is not None:
            self._groups = AbandonedGroups(serve.get_replica_context().app_name, free_after_s)
        self._tasks: list[asyncio.Task[None]] = []
        self._is_complete_at: float | None = None

    async def report(self, member: Member) -> list[Member]:
        """Take a member's report; answers with all members, so that who reports needs no second call."""
        self._list.report(member, time.monotonic())
        if self._supervisor is not None:
            self._supervisor.heard(member)
        if self._groups is not None and (lineage := member.details.get("lineage")):
            self._groups.heard(lineage, time.monotonic())
        self._begin()
        return await self.members()

    def _begin(self) -> None:
        if self._tasks:
            return
        loop = asyncio.get_running_loop()
        if self._supervisor is not None:
            self._tasks.append(loop.create_task(supervise(self._supervisor)))
        if self._groups is not None:
            self._tasks.append(loop.create_task(free_abandoned(self._groups)))

    async def leave(self, member_id: str) -> None:
        """The member ends."""
        self._list.leave(member_id)
        if self._supervisor is not None:
            self._supervisor.forget(member_id)

    async def members(self) -> list[Member]:
        """All members, by kind and id."""
        now = time.monotonic()
        if self._is_complete_at is None:
            self._is_complete_at = now + _HEARING_S
        if now < self._is_complete_at:
            await asyncio.sleep(self._is_complete_at - now)
        return self._list.members(time.monotonic())


async def ask(
    directory: DeploymentHandle, method: str, *arguments: Any, timeout_s: float = _CALL_TIMEOUT_S
) -> Any:
    """Call a method of the directory, as everybody must who does.

    The answers to `directory.METHOD.remote()` leave a replica through one thread of Ray's, which waits until
    each caller has taken the beginning of its own. One caller that is stopped at the wrong moment holds up
    the answers to all others, and to Ray Serve's health checks. A broadcast is answered without that thread.

    Raises:
        TimeoutError: if there is none, or it does not answer, for `timeout_s`.
        RayError: if it was lost meanwhile.
    """
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                return (await directory.broadcast(method, *arguments).results_async())[-1]
            except DeploymentUnavailableError:  # it is replaced, or this process has not heard of it yet
                await asyncio.sleep(_PAUSE_S)


class ListedCells:
    """The cells among the members, for a front end's connections (`cell_source.CellSource`).

    While another target takes this one's place, which Kubernetes does when told to, or other adapters do,
    there are cells of both. What one has begun the other must not go on with, nor read the tokens of its
    front ends.

    Args:
        members: all that were last heard of; may be called from other threads than the one that hears.
        target: whose cells they must be (`cluster.served_target`).
        is_leaving: whether the front end is being removed. One that stays waits for cells of its own also
            beside others: a rollout that was taken back makes some again.
    """

    poll_s: float | None = 0.1

    def __init__(
        self,
        members: Callable[[], Sequence[Member]],
        target: str,
        is_leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        self._members, self._target, self._is_leaving = members, target, is_leaving
        self._replaced_since: float | None = None

    @property
    def are_replaced(self) -> bool:
        """See `CellSource`."""
        staying = [one for one in self._members() if one.kind == "cell" and one.state != "draining"]
        if not (self._is_leaving() and staying) or any(map(self._is_own, staying)):
            self._replaced_since = None
            return False
        self._replaced_since = self._replaced_since or time.monotonic()
        return time.monotonic() - self._replaced_since >= UNHEARD_S

    async def cells(self) -> Sequence[Member]:
        """See `CellSource`."""
        return [one for one in self._members() if one.kind == "cell" and self._is_own(one)]

    def _is_own(self, cell: Member) -> bool:
        return cell.details.get("target") == self._target


class DirectoryClient:
    """A member's side of the directory: reports on it, and remembers what it last heard of the others.

    Args:
        directory: the deployment.
        describe: the member as it is now; called for every report.
        interval_s: time between reports.
    """

    def __init__(
        self,
        directory: DeploymentHandle,
        describe: Callable[[], Member],
        interval_s: float = REPORT_INTERVAL_S,
    ) -> None:
        self._directory = directory
        self._describe = describe
        self._interval_s = interval_s
        self._members: list[Member] = []
        self._heard_at = -math.inf
        self._task: asyncio.Task[None] | None = None

    @property
    def members(self) -> list[Member]:
        """Everybody, as last heard; older while the directory is away."""
        return self._members

    @property
    def heard_at(self) -> float:
        """When that was, by `time.monotonic`; in the distant past before the first answer."""
        return self._heard_at

    def start(self) -> None:
        """Report from now on, in the running event loop."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="directory reports")

    async def report(self) -> None:
        """Report once, now."""
        self._members = list(await ask(self._directory, "report", self._describe()))
        self._heard_at = time.monotonic()

    async def leave(self) -> None:
        """Report no longer, and say so."""
        if self._task is not None:
            self._task.cancel()
        with contextlib.suppress(Exception):  # it would notice the silence
            await ask(self._directory, "leave", self._describe().id)

    async def _run(self) -> None:
        was_reached = True
        while True:
            try:
                await self.report()
                if not was_reached:
                    _log.warning("the directory answers again")
                was_reached = True
            except Exception as error:  # a remote call: anything may come out of it, and it may pass
                if was_reached:
                    _log.warning("the directory does not answer: %r", error)
                was_reached = False
            await asyncio.sleep(self._interval_s)
