"""What a call takes by the layers it computed: a line learnt from calls, its slope near the profile's."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.newest_weight import NewestWeight

# While calls differ in their layers by less than this share of what they come to, the slope is the profile's
# rather than theirs: then all that they take besides belongs to the call.
RIDGE = 0.25
# A call counts as at most so many times what is expected of it: a hiccup of the machine is not believed.
MOST_TIMES = 4.0


@dataclass(slots=True)
class CallCost:
    """Seconds of a call, as a line over the seconds that the profile gives its layers alone.

    A call takes time whatever it computes, and layers that were computed ahead take hardly any. One factor
    for both says that a deep call takes as many times its layers as a flat one, and makes drafting look
    several times as expensive as it is. Least squares with exponential forgetting, and a ridge towards
    slope 1.

    Attributes:
        slope: seconds per second of layers.
        fixed_s: seconds of a call besides.
    """

    slope: float = 1.0
    fixed_s: float = 0.0
    _weight: NewestWeight = field(default_factory=NewestWeight)
    _is_known: bool = False
    _layers_s: float = 0.0
    _seconds: float = 0.0
    _variance: float = 0.0
    _covariance: float = 0.0

    def expected_s(self, layers_s: float) -> float:
        """Seconds of a call whose layers take so long by the profile."""
        return self.slope * layers_s + self.fixed_s

    def observe(self, layers_s: float, seconds: float, smoothing: float) -> None:
        """One call; `smoothing` is the weight of the newest, above 0.

        Calls without layers say nothing, and are passed over.
        """
        if layers_s <= 0.0 or seconds <= 0.0:
            return
        if not self._is_known:
            self._is_known = True
            self._layers_s, self._seconds = layers_s, self.expected_s(layers_s)
        seconds = min(seconds, MOST_TIMES * self.expected_s(layers_s))
        weight = self._weight.next(smoothing)
        more, longer = layers_s - self._layers_s, seconds - self._seconds
        self._layers_s += weight * more
        self._seconds += weight * longer
        self._variance = (1.0 - weight) * (self._variance + weight * more * more)
        self._covariance = (1.0 - weight) * (self._covariance + weight * more * longer)
        ridge = (RIDGE * self._layers_s) ** 2
        slope = max(0.0, (self._covariance + ridge) / (self._variance + ridge))
        fixed_s = self._seconds - slope * self._layers_s
        if fixed_s < 0.0:  # no call takes less than nothing: the line goes through zero
            slope, fixed_s = self._seconds / self._layers_s, 0.0
        self.slope, self.fixed_s = slope, fixed_s

    def missed(self) -> None:
        """A step without such a call: what is known tells less of the next."""
        self._weight.missed()
