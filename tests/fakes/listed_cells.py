"""Cells without models in a directory whose entries the test writes, and what a front end asks them for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from cluster.members import Member, State
from cluster.stream_messages import Rejected, Submit
from deployments.cell_clients import CellClients
from engine.sampling_params import SamplingParams
from tests.fakes.cell_stand_in import CellStandIn, eventually

_ids = itertools.count()
DRAINING = Rejected(request_id="", code="draining", message="the cell is being removed")
STARTING = Rejected(request_id="", code="not_ready", message="the target model is starting")
FULL = Rejected(request_id="", code="queue_full", message="full", retry_after_s=2.0)
INFEASIBLE = Rejected(request_id="", code="slo_infeasible", message="below the least this cell can reach")


class Listed:
    """A directory whose entries the test writes."""

    poll_s: float | None = 0.01

    def __init__(self) -> None:
        self.are_replaced = False
        self.stand_ins: dict[str, CellStandIn] = {}
        self.states: dict[str, State] = {}
        self.queues: dict[str, float] = {}
        self.backlogs: dict[str, float] = {}
        self.prefill_s_per_token = 0.0

    async def cells(self) -> Sequence[Member]:
        found = []
        for name, stand_in in self.stand_ins.items():
            host, port, token = await stand_in.endpoint()
            state = self.states.get(name, "ready")
            queue_s = self.queues.get(name, 0.0)
            stats = {"running": float(len(stand_in._tasks)), "queue_s": queue_s}
            stats["background_queue_s"] = queue_s + self.backlogs.get(name, 0.0)
            stats["prefill_s_per_token"] = self.prefill_s_per_token
            found.append(
                Member(
                    kind="cell",
                    id=name,
                    node=host,
                    endpoint=(host, port, token.decode()),
                    state=state,
                    stats=stats,
                )
            )
        return found

    def add(self, name: str) -> CellStandIn:
        made = self.stand_ins[name] = CellStandIn(lambda submit: list(range(100)))
        made.pause_s = 0.005
        return made

    async def kill(self, name: str) -> None:
        await self.stand_ins.pop(name).close()


def submission(length: int = 60) -> Submit:
    return Submit(
        request_id=f"request-{next(_ids)}", prompt=[1, 2], sampling=SamplingParams(max_tokens=length)
    )


async def tokens_of(clients: CellClients, request: Submit) -> list[int]:
    tokens: list[int] = []
    async for event in clients.submit(request):
        assert event.position == len(tokens)
        assert event.request_id == request.request_id
        tokens += event.tokens
    return tokens


async def connected(clients: CellClients, number: int) -> None:
    await eventually(lambda: sum(one.is_open for one in clients._connections.values()) == number)
