"""The Ray Serve deployment of a cell: `cluster.cell.Cell` that reports to the directory."""

from __future__ import annotations

import logging

from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.util import get_node_ip_address

from cluster.cell import Cell
from cluster.config import FlotillaConfig
from cluster.members import Member
from deployments.directory import DirectoryClient

_log = logging.getLogger(__name__)


class CellReplica(Cell):
    """A cell of the system.

    Args:
        config: of every cell.
        directory: who learns of it.
    """

    def __init__(self, config: FlotillaConfig, directory: DeploymentHandle) -> None:
        super().__init__(config)
        self._id = serve.get_replica_context().replica_id.unique_id
        self._directory = DirectoryClient(directory, self.member)
        self._directory.start()

    def member(self) -> Member:
        """The cell as the directory shall know it."""
        return Member(
            kind="cell",
            id=self._id,
            node=get_node_ip_address(),
            endpoint=self.address,
            metrics_url="",
            stats=self.load(),
            state=self.state,
            details={"stage": self.stage},
        )

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Ray Serve passes to `deployments.autoscaling`."""
        return self.load()
