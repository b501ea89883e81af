"""The Ray Serve deployment of a cell: `cluster.cell.Cell` that reports to the directory and drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.util import get_node_ip_address

from cluster.cell import Cell
from cluster.config import FlotillaConfig
from cluster.log_files import log_to_files
from cluster.members import REPORT_INTERVAL_S, Member
from cluster.process_environment import take_on
from cluster.served_target import served_target
from deployments.arriving import OthersServing
from deployments.directory import DirectoryClient
from deployments.metric_server import MetricServer
from deployments.supervising import identity

_log = logging.getLogger(__name__)

#: A cell that has no others beside it need not tell its load so often.
_ALONE_INTERVAL_S = 1.0
_POLL_S = 0.1
# Where nobody but Ray Serve ends a cell that does not report, it takes so long.
_GONE_S = 30.0
# What was sent last is given this long to leave the process.
_FAREWELL_S = 0.1


class CellReplica(Cell):
    """A cell of the system.

    Made beside cells that serve, it counts as there only once it serves too: until then, what asks any cell
    (its description, its metrics) is answered by the others. The first one is there at once and tells how far
    its start has come.

    Args:
        config: of every cell.
        directory: who learns of it.
    """

    # Ray Serve awaits constructors that are coroutines; Python's own rule, which mypy knows, has none.
    async def __init__(self, config: FlotillaConfig, directory: DeploymentHandle) -> None:  # type: ignore[misc]
        take_on()
        context = serve.get_replica_context()
        self._id = context.replica_id.unique_id
        super().__init__(config, context.app_name, self._id)
        self._identity = identity() | {"target": served_target(config.target)}
        log_to_files(config.log, {"cell": self._id})
        scaling = config.scaling.cells
        interval_s = _ALONE_INTERVAL_S if scaling.max == 1 else REPORT_INTERVAL_S
        self._metrics.set.constant["cell"] = self._id
        loop = asyncio.get_running_loop()
        self._metric_server = MetricServer(
            self._metrics.set, get_node_ip_address(), self._refresh_metrics, loop
        )
        self._directory = DirectoryClient(directory, self.member, interval_s)
        self._directory.start()
        others_serve = OthersServing(self._directory, self._id, config.health.member_silent_s or _GONE_S)
        while self.state != "ready" and (scaling.await_ready or others_serve):
            if self._failure and not others_serve.are_unheard:
                break
            await asyncio.sleep(_POLL_S)
        if self.state == "ready":
            # Known before Serve stops whom it replaces.
            with contextlib.suppress(Exception):  # it is reported again in any case
                await self._directory.report()
        if self._failure and (scaling.await_ready or others_serve):
            raise RuntimeError(self._failure)

    def member(self) -> Member:
        """The cell as the directory shall know it."""
        return Member(
            kind="cell",
            id=self._id,
            node=get_node_ip_address(),
            endpoint=self.address,
            metrics_url=self._metric_server.url,
            stats=self.load(),
            state=self.state,
            details={
                "stage": self._failure or self._stage,
                "lineage": self._workers.lineage,
                **self._identity,
            },
        )

    def _refresh_metrics(self) -> None:
        self._metrics.refresh(self.core, self._shell.scheduler_s)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Ray Serve passes to `deployments.autoscaling`; `ready` tells whether it serves."""
        return {**self.load(), "ready": float(self.state == "ready")}

    # Awaited by Ray Serve, too; Python itself never calls it before the process ends.
    async def __del__(self) -> None:  # type: ignore[override]
        """Called by Ray Serve when the replica is removed, which waits for it; then the process is ended."""
        if self.state == "draining":
            return
        draining = asyncio.ensure_future(self.drain(self.config.scaling.cells.drain_timeout_s))
        try:
            await self._directory.report()
        except Exception as error:  # front ends learn of it by what is given back to them
            _log.warning("the directory does not hear that this cell drains: %r", error)
        await draining
        await self._directory.leave()
        await asyncio.sleep(_FAREWELL_S)
        super().__del__()
