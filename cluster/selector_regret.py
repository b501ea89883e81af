"""What the present assignment of drafters is estimated to lose; looked at when somebody asks for it."""

from __future__ import annotations

from cluster.core import SchedulerCore
from selector.outlook import Outlook


def estimated_regret(core: SchedulerCore) -> float:
    """Tokens per second that running requests would gain if each had its best drafter, as if all had places.

    By the pool's own estimates of acceptance and cost, each request by itself; requests that must not be
    drafted for, and those no step has decoded yet, lose nothing.
    """
    pool, regret = core.pool, 0.0
    view = pool.pool_view()
    for request in core.running.values():
        allowed = pool.allowed(request)
        if not allowed or not request.num_steps:
            continue
        outlook = Outlook(pool.request_view(request), view)
        kinds = {pool.kind_of(name) for name in allowed}
        promised = {
            kind: outlook.goodput(kind, pool.acceptance.rate(request.request_id, kind)) for kind in kinds
        }
        present = promised.get(pool.kind_of(request.drafter), outlook.none)
        regret += max(max(promised.values()), present) - present
    return regret
