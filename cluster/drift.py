"""A model whose forwards lastingly take longer, or less long, than its cost profile says."""

from __future__ import annotations

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
