"""Whether drafts are proposed at all, by how many requests run at once."""

from __future__ import annotations

from collections.abc import Callable, Collection

from cluster.requests import Request
from cluster.running_mean import SMOOTHING

# Share of recent plans with a draft below which drafting is not worth preparing (SmartSpec, section 5).
LEAST = 0.3
# Up to so many requests at once drafters are idle anyway, and what did not pay for one may for the next.
FEW_REQUESTS = 2
# Weight of a step in which the policy rests: it looks again after some, so many rests in a row must agree.
RESTING = 0.02
# Where drafts are not proposed, drafters still read one request in so many: so it is noticed when they pay.
# Where they hardly ever are, fewer: on an accelerator that both share, the target waits for each.
PROBE_REQUESTS, SELDOM_REQUESTS = 8, 32
HARDLY_EVER = 0.05


class Proposing:
    """Share of the requests planned for that got a draft, lately, for each size of the batch.

    SmartSpec disables the drafter's prefill once 70 % of recent steps proposed nothing. But whether it pays
    depends on how many requests run at once: that it did not for many says nothing of few, and what is
    learnt when a burst has nearly ended does not hold for the next one. Sizes are told apart by powers of
    two.

    Attributes:
        taking_part: whom steps are for, of those who run, and those of them who begin one: the batching rule
            may let some sit out.
    """

    taking_part: Callable[[Collection[Request], Collection[Request]], Collection[Request]]

    def __init__(self) -> None:
        self.taking_part = lambda running, _: running
        self._shares: dict[int, float] = {}

    def planned(self, num_running: int, share: float) -> None:
        """Of the requests that could be drafted for with `num_running` running, this share was."""
        self._follow(num_running, share, SMOOTHING)

    def rested(self, num_running: int) -> None:
        """The policy did not look: it found before that drafting does not pay."""
        self._follow(num_running, 0.0, RESTING)

    def share(self, num_running: int) -> float:
        """What is known for so many, else for fewer; 1 at first."""
        for size in range(num_running.bit_length(), 0, -1):
            if size in self._shares:
                return self._shares[size]
        return 1.0

    def pays(self, num_running: int) -> bool:
        """Whether drafts are proposed often enough for drafters to read prompts."""
        return num_running <= FEW_REQUESTS or self.share(num_running) >= LEAST

    def reads(self, order: int, num_running: int) -> bool:
        """Whether drafters read the prompt of the request that came as number `order`.

        Also while the policy rests: who was not read is not drafted for when it looks again, and for want of
        drafts it would rest on.
        """
        if self.pays(num_running):
            return True
        return order % (PROBE_REQUESTS if self.share(num_running) >= HARDLY_EVER else SELDOM_REQUESTS) == 0

    def _follow(self, num_running: int, share: float, weight: float) -> None:
        known = self.share(num_running)
        self._shares[num_running.bit_length()] = known + weight * (share - known)
