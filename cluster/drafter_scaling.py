"""How many instances of each kind of drafter a cell should have, by capacity prices; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.scaling_config import DrafterScalingConfig


@dataclass(frozen=True, slots=True)
class KindLoad:
    """A kind of drafter as it is now.

    Attributes:
        kind: its name.
        instances: there or being loaded, without those that drain.
        least: never fewer (as configured).
        places: requests that one instance serves at once.
        served: requests that all of them serve.
        price: tokens per second that one more place would bring; 0 where all have places.
        is_changing: an instance is loading or draining.
        has_room: resources for one more instance are free.
    """

    kind: str
    instances: int
    least: int
    places: int
    served: int
    price: float
    is_changing: bool = False
    has_room: bool = True


@dataclass(slots=True)
class _Memory:
    scarce_since: float | None = None
    idle_since: float | None = None
    changed_at: float | None = None


class DrafterScaling:
    """Adds an instance where places were worth a lot for long, drains one where they were worth nothing.

    The capacity price of a kind is the dual of its capacity in the selector's matching of requests to
    drafters (SPIN section IV): what the objective would gain by one more place.

    Args:
        config: thresholds and times.
    """

    def __init__(self, config: DrafterScalingConfig) -> None:
        self._config = config
        self._memory: dict[str, _Memory] = {}

    def decide(self, kinds: Sequence[KindLoad], now: float) -> dict[str, int]:
        """New numbers of instances, by kind, where they are to change; `now` in seconds."""
        present = {load.kind for load in kinds}
        self._memory = {kind: seen for kind, seen in self._memory.items() if kind in present}
        changes = {}
        for load in kinds:
            wanted = self._wanted(load, self._memory.setdefault(load.kind, _Memory()), now)
            if wanted != load.instances:
                changes[load.kind] = wanted
                self._memory[load.kind] = _Memory(changed_at=now)
        return changes

    def _wanted(self, load: KindLoad, seen: _Memory, now: float) -> int:
        config = self._config
        is_scarce = load.price >= config.price_high
        # The places of one instance must be free: else those it serves would go without a drafter.
        is_idle = load.price <= 0.0 and load.served <= load.places * (load.instances - 1)
        seen.scarce_since = (now if seen.scarce_since is None else seen.scarce_since) if is_scarce else None
        seen.idle_since = (now if seen.idle_since is None else seen.idle_since) if is_idle else None
        if load.is_changing or (seen.changed_at is not None and now - seen.changed_at < config.cooldown_s):
            return load.instances
        if seen.scarce_since is not None and now - seen.scarce_since >= config.sustained_s:
            most = max(config.max_replicas, load.least)
            return load.instances + 1 if load.has_room and load.instances < most else load.instances
        if seen.idle_since is not None and now - seen.idle_since >= config.idle_s:
            # Where somebody has taken away more than that, being idle is no reason for another one.
            return max(min(load.least, load.instances), load.instances - 1)
        return load.instances
