"""A model whose forwards lastingly take longer, or less long, than its cost profile says."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

# A correction beyond this factor, up or down, for so many steps in a row, is a drift. Target and drafters in
# turn take up to 1.6 times what each takes by itself, for they share caches: that is no drift yet.
DRIFT_FACTOR = 2.0
DRIFT_STEPS = 200


class Drift(msgspec.Struct, frozen=True):
    """A model began to drift from its profile, or came back.

    Attributes:
        model: a drafter's name, or `VERIFY_PLAIN`, `VERIFY_DRAFTED`.
        factor: the present correction.
        is_drifting: False when it came back.
    """

    model: str
    factor: float
    is_drifting: bool

    def __str__(self) -> str:
        if not self.is_drifting:
            return f"{self.model}: forwards take what the cost profile says again (times {self.factor:.2f})"
        return (
            f"{self.model}: for {DRIFT_STEPS} steps forwards have taken {self.factor:.2f} times what the "
            "cost profile says: it is another machine's, or this one is shared. Plans are corrected for "
            "it; a new profile (`flotilla profile`) would predict better"
        )


@dataclass(slots=True)
class DriftWatch:
    """Tells a lasting change of a correction from a passing one, in both directions."""

    _drifting: set[str] = field(default_factory=set)
    _against: dict[str, int] = field(default_factory=dict)
    _drifts: list[Drift] = field(default_factory=list)

    def look(self, model: str, factor: float, least: float) -> None:
        """A correction after one more step; below `least`, as above `DRIFT_FACTOR`, it drifts."""
        is_beyond = not least <= factor <= DRIFT_FACTOR
        if is_beyond == (model in self._drifting):
            self._against[model] = 0
            return
        steps = self._against[model] = self._against.get(model, 0) + 1
        if steps < DRIFT_STEPS:
            return
        self._against[model] = 0
        self._drifting.symmetric_difference_update((model,))
        self._drifts.append(Drift(model, factor, is_beyond))

    def take(self) -> list[Drift]:
        """What began to drift or came back since the last time this was asked."""
        taken, self._drifts = self._drifts, []
        return taken
