"""A simulated cell whose clients come back when they were told to."""

from __future__ import annotations

import math
from dataclasses import replace

from cluster.events import Action, Reject
from cluster.stream_messages import Rejected
from simulator.hardware import HardwareProfile
from simulator.run import Cell, Options
from simulator.systems import System
from simulator.workloads import SimRequest


class CellWithReturningClients(Cell):
    """Whoever is refused comes back once, when told, under its id with " again" behind it.

    Attributes:
        returns: whether they do.
        requests: what was submitted, by id.
        rejections: by id.
    """

    def __init__(
        self, profile: HardwareProfile, system: System, options: Options, *, returns: bool = True
    ) -> None:
        super().__init__(profile, system, options)
        self.returns = returns
        self.requests: dict[str, SimRequest] = {}
        self.rejections: dict[str, Rejected] = {}

    def submit(self, request: SimRequest) -> None:
        self.requests[request.request_id] = request
        super().submit(request)

    def _act(self, action: Action) -> None:
        super()._act(action)
        if isinstance(action, Reject):
            told = action.rejection
            self.rejections[told.request_id] = told
            if self.returns and not told.request_id.endswith(" again"):
                assert told.retry_after_s is not None
                at = self.clock.now + math.ceil(told.retry_after_s)  # as the header is rounded
                again = f"{told.request_id} again"
                self.submit(replace(self.requests[told.request_id], request_id=again, arrival_s=at))
