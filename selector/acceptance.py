"""What is known of each drafter on each request: acceptance rates with shrinkage to the drafter's mean."""

from __future__ import annotations

from dataclasses import dataclass, field

# Tokens of evidence that the drafter's mean over all requests counts for.
PRIOR_TOKENS = 6.0
# A drafter starts out believed this good, until observed; worth this many tokens of evidence.
INITIAL_RATE = 0.7
INITIAL_TOKENS = 20.0
# A drafter's mean follows at least this share of the newest token, however much it has seen.
SMOOTHING = 0.003


@dataclass(slots=True)
class AcceptanceEstimates:
    """Chance that a drafter's next token is the target's, per drafter and per (request, drafter)."""

    _mean: dict[str, float] = field(default_factory=dict)
    _seen: dict[str, float] = field(default_factory=dict)
    _counts: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)

    def expect(self, drafter: str, rate: float) -> None:
        """What to believe of a drafter before anything is known of it; ignored once something is."""
        self._mean.setdefault(drafter, rate)

    def observe(self, request_id: str, drafter: str, tried: int, accepted: int) -> None:
        """Fold in `accepted` of `tried` tokens: verified ones, or scored while catching up."""
        if tried <= 0:
            return
        mean = self._mean.get(drafter, INITIAL_RATE)
        seen = self._seen.get(drafter, INITIAL_TOKENS)
        # The plain mean of all tokens at first, a moving average later.
        weight = max(tried / (seen + tried), min(1.0, SMOOTHING * tried))
        self._mean[drafter] = mean + weight * (accepted / tried - mean)
        self._seen[drafter] = seen + tried
        counts = self._counts.setdefault(request_id, {})
        old_tried, old_accepted = counts.get(drafter, (0.0, 0.0))
        counts[drafter] = (old_tried + tried, old_accepted + accepted)

    def rate(self, request_id: str, drafter: str) -> float:
        """Estimated acceptance rate, between the drafter's mean and this request's own evidence."""
        mean = self._mean.get(drafter, INITIAL_RATE)
        tried, accepted = self._counts.get(request_id, {}).get(drafter, (0.0, 0.0))
        return (PRIOR_TOKENS * mean + accepted) / (PRIOR_TOKENS + tried)

    def evidence(self, request_id: str, drafter: str) -> float:
        """Tokens of this request the drafter has been judged on."""
        return self._counts.get(request_id, {}).get(drafter, (0.0, 0.0))[0]

    def forget(self, request_id: str) -> None:
        """Drop a finished request; the drafters' means keep what it taught."""
        self._counts.pop(request_id, None)


def expected_tokens(rate: float, depth: int) -> float:
    """Tokens one step yields with chains of `depth` (SmartSpec: `(1 - a^(k+1)) / (1 - a)`)."""
    if rate >= 1.0:
        return depth + 1.0
    return float((1.0 - rate ** (depth + 1)) / (1.0 - rate))
