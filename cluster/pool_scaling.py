"""A cell's pool of drafters follows its capacity prices: looks at it now and then, and has it changed."""

from __future__ import annotations

import logging

from cluster.config import FlotillaConfig
from cluster.drafter_scaling import DrafterScaling, KindLoad
from cluster.lifecycle import Lifecycle, Shell
from cluster.pool_changes import PoolChanges
from cluster.pool_errors import PoolError

_log = logging.getLogger(__name__)

#: Seconds that a change waits for the new instance; it goes on loading after that.
_WAIT_S = 30.0


class PoolScaling:
    """Scales the kinds of drafters that the cell was configured with (`scaling.drafters`).

    Args:
        config: the cell, as it starts.
        lifecycle: its workers.
        changes: who changes its pool.
        shell: the scheduler's shell.
    """

    def __init__(
        self, config: FlotillaConfig, lifecycle: Lifecycle, changes: PoolChanges, shell: Shell
    ) -> None:
        self._is_enabled = config.scaling.drafters.enabled
        self._policy = DrafterScaling(config.scaling.drafters)
        self._least = {drafter.name: drafter.replicas for drafter in config.drafters}
        self._lifecycle = lifecycle
        self._changes = changes
        self._shell = shell
        self._changing: set[str] = set()

    def look(self, now: float) -> None:
        """Called about every quarter of a second while the cell serves; changes go on beside."""
        if not self._is_enabled or self._lifecycle.target.num_slots == 0:
            return
        loads = [self._load(kind) for kind in self._lifecycle.kinds if kind in self._least]
        for kind, wanted in self._policy.decide(loads, now).items():
            self._changing.add(kind)
            self._lifecycle.spawn(self._change(kind, wanted))

    def _load(self, kind: str) -> KindLoad:
        lives = self._lifecycle.of_kind(kind)
        core = self._shell.core
        there = [drafter for drafter in core.pool.drafters.values() if drafter.kind == kind]
        # The last matching's prices stay when nobody is left to be matched.
        price = core.pool.selector.prices().get(kind, 0.0) if core.running else 0.0
        config = self._lifecycle.kinds[kind]
        return KindLoad(
            kind=kind,
            instances=sum(life.state != "draining" for life in lives),
            least=self._least[kind],
            places=config.max_requests,
            served=sum(len(drafter.served) for drafter in there),
            price=price,
            is_changing=kind in self._changing or any(life.state != "ready" for life in lives),
        )

    async def _change(self, kind: str, wanted: int) -> None:
        there = sum(life.state != "draining" for life in self._lifecycle.of_kind(kind))
        try:
            config = self._lifecycle.kinds.get(kind)
            if config is None:  # removed since it was looked at
                return
            if wanted > there and not self._lifecycle.has_room(config):
                _log.info("drafter %s is scarce, and there are no resources for another instance", kind)
                return
            _log.warning("drafter %s: %d instances instead of %d", kind, wanted, there)
            await self._changes.scale(kind, wanted, _WAIT_S)
        except PoolError as error:
            _log.warning("drafter %s could not be scaled to %d: %s", kind, wanted, error)
        finally:
            self._changing.discard(kind)
